"""Ranks that are started again find one another, although the store remembers the dead."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from penstock.errors import StepTimeout
from penstock.train.meet import agree_on_life


def meet(store: dist.Store, size: int, late: int = 0) -> list[str]:
    names = [""] * size

    def be(rank: int) -> None:
        names[rank] = agree_on_life(store, rank, size, patience=20)

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(size)]
    order = threads[late:] + threads[:late]
    for thread in order:
        thread.start()
    for thread in threads:
        thread.join(30)
    return names


def test_each_life_has_a_name_of_its_own() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    store.set("penstock/here/1", "of a rank that died before it was answered")
    lives = [meet(store, 3, late) for late in (0, 1, 2)]
    assert all(len(set(names)) == 1 for names in lives)
    assert len({names[0] for names in lives}) == 3


def test_a_rank_that_never_starts_is_named() -> None:
    with pytest.raises(StepTimeout, match=r"ranks \[1, 2\]") as caught:
        agree_on_life(dist.HashStore(), 0, 3, patience=0.2)
    assert [line.split()[:1] for line in str(caught.value).splitlines()[1:]] == [["rank"], ["0"], ["1"], ["2"]]
    assert "waits for rank 1" in str(caught.value)
    with pytest.raises(StepTimeout, match=r"(?s)rank 2 waited 0.2 s for rank 0 to start.*2 .* waits for rank 0"):
        agree_on_life(dist.HashStore(), 2, 3, patience=0.2)
