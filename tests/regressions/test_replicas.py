"""Pipelines of data-parallel replicas that went apart, or hung."""

from __future__ import annotations

import pytest

from tests.gloo_pool import GlooPool
from tests.parity.test_data_parallel import ddp, fsdp, train_all

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]


def test_23_replicas_with_a_split_backward_have_the_same_gradients(gloo_pool: GlooPool) -> None:
    """DDP saw a backward for each microbatch, and none for the weights of a split one: with zero-bubble schedules the
    gradients were never reduced; with GPipe it asserted at the second step; FSDP2 reduced at every microbatch."""
    gloo_pool.run(4, train_all, ddp, ["zbv", "gpipe"], timeout=60.0)
    gloo_pool.run(4, train_all, fsdp, ["interleavedzerobubble"], timeout=60.0)
