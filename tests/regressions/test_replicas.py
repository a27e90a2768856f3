"""Pipelines of data-parallel replicas that went apart, or hung."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import penstock
from penstock.comm import FailureRecord
from penstock.comm.host_group import blamed
from penstock.stage.dtensors import whole_tensor
from tests.gloo_pool import GlooPool
from tests.parity.test_data_parallel import ddp, fsdp, train_all

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]


def test_replicas_with_a_split_backward_have_the_same_gradients(gloo_pool: GlooPool) -> None:
    """DDP saw a backward for each microbatch, and none for the weights of a split one: with zero-bubble schedules the
    gradients were never reduced; with GPipe it asserted at the second step; FSDP2 reduced at every microbatch."""
    gloo_pool.run(4, train_all, ddp, ["zbv", "gpipe"], timeout=60.0)
    gloo_pool.run(4, train_all, fsdp, ["interleavedzerobubble"], timeout=60.0)


def test_a_replica_that_died_is_named_before_one_that_gave_up_because_of_it() -> None:
    """Of three replicas one was killed. The second saw it, gave up and said so; the third then named the second."""
    died = FailureRecord(1, cause="its process has ended")
    gave_up = FailureRecord(2, cause="its pipeline cannot go on: rank 1 has ended")
    own_words = FailureRecord(1, cause="its pipeline cannot go on: it says why")
    assert blamed(died, {2: gave_up}) == died
    assert blamed(died, {1: own_words, 2: gave_up}) == own_words
    assert blamed(None, {2: gave_up}) == gave_up
    assert blamed(None, {}) is None


def load_into_shards() -> list[list[float]]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    stage = penstock.PipelineStage(nn.Linear(4, 1), 0, 1, "cpu", group=mesh["pp"].get_group())
    pipe = penstock.Pipeline(
        stages=[stage], mesh=mesh, data_parallel="fsdp", loss_fn=nn.functional.mse_loss, microbatches=2, schedule="1f1b"
    )
    pipe.load_state_dict({"weight": torch.arange(4.0).reshape(1, 4), "bias": torch.tensor([7.0])})
    return [whole_tensor(parameter).flatten().tolist() for parameter in pipe.parameters()]


def test_a_replica_whose_shard_is_empty_takes_a_state_dict(gloo_pool: GlooPool) -> None:
    """Of a parameter with fewer rows than replicas one of them holds nothing: it was given the whole plain tensor, which torch
    refused, and the other replica lost its connection."""
    assert gloo_pool.run(2, load_into_shards) == [[[0.0, 1.0, 2.0, 3.0], [7.0]]] * 2
