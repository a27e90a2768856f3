from __future__ import annotations

import pytest
import torch

from penstock.dtypes import dtype_name, dtype_named
from penstock.errors import PenstockError

ALL = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_every_type_of_torch_has_a_name_that_leads_back_to_it(dtype: torch.dtype) -> None:
    assert dtype_named(dtype_name(dtype)) is dtype


@pytest.mark.parametrize("name", ["float33", "torch.float32", "nn", "", None, 7, ["float32"]])
def test_another_name_is_refused_with_what_was_given(name: object) -> None:
    with pytest.raises(PenstockError, match="no type of tensors"):
        dtype_named(name)  # type: ignore[arg-type]
