"""StageBase: what every stage is, whoever drives it."""

from __future__ import annotations

from typing import Any

from penstock.errors import StageError
from penstock.stage.chunks import Chunks

HOOKS = (
    "forward_one_chunk",
    "backward_one_chunk",
    "backward_weight_one_chunk",
    "forward_maybe_with_nosync",
    "backward_maybe_with_nosync",
    "scale_grads",
    "perform_reduce_grad",
    "get_fwd_recv_ops",
    "get_fwd_send_ops",
    "get_bwd_recv_ops",
    "get_bwd_send_ops",
    "set_local_fwd_input",
    "set_local_bwd_input",
    "get_local_bwd_output",
    "_prepare_forward_infra",
    "_prepare_backward_infra",
)
"""Methods that subclasses override to take part in a step."""


class StageBase(Chunks):
    """The base of all stages. A subclass that calls no constructor sets at least `submod`, `num_stages`, `group_size`,
    `group_rank` and `group`; that is enough to build a schedule and to read its order.
    """

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: dict[str, Any] | None = None, has_backward: bool = False
    ) -> Any:
        raise StageError(f"{type(self).__name__} does not say what it receives; override _prepare_forward_infra")

    def _prepare_backward_infra(
        self,
        num_microbatches: int,
        loss_fn: Any = None,
        target: Any = None,
        received_grad_meta: Any = None,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        raise StageError(
            f"{type(self).__name__} does not say what gradients it receives; override _prepare_backward_infra"
        )
