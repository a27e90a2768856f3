"""The rest of the table in docs/guides/when-something-goes-wrong.md, on the simulated accelerator.

Exceptions, deaths, stops and departures are in test_boundaries_and_faults.py.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store

from penstock.comm import DistributedTransport
from penstock.errors import PenstockError
from penstock.run import Schedule1F1B
from penstock.stage.pipeline_stage import PipelineStage
from tests.accelerator.pipes import batch, block
from tests.accelerator.pool import SimPool
from tests.accelerator.test_boundaries_and_faults import MICROBATCHES, die, raised_in_steps, schedule_of, squares
from tests.accelerator.test_device import held
from tests.faults.fragile import SOON, until
from tests.faults.test_heartbeat import SHORT, NoNamespaces, cut_the_network, two_hosts
from tests.gloo_pool import free_port


class Acts(nn.Module):
    """A block that does something before its forward, once, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act = block(dist.get_rank()), None

    def forward(self, x: Tensor) -> Tensor:
        act: Any = self.act
        self.act = None
        if act is not None:
            act()
        value: Tensor = self.inner(x)
        return value


def stepped(device: torch.device, acts: dict[int, Any], *, steps: int = 2) -> tuple[list[str], float]:
    """A good step; then steps in the first of which the ranks in `acts` do something."""
    module = Acts()
    schedule = schedule_of(device, module)
    x, y = (part.to(device) for part in batch(MICROBATCHES))
    schedule.step(x, target=y)
    module.act = acts.get(dist.get_rank())
    found, start = [], time.monotonic()
    for _ in range(steps):
        try:
            schedule.step(x, target=y)
            found.append("")
        except (PenstockError, KeyboardInterrupt) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found, time.monotonic() - start


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)


def interrupted(device: torch.device) -> tuple[list[str], float]:
    return stepped(device, {1: interrupt})


def test_ctrl_c_on_one_rank_ends_the_step_everywhere_and_the_next_one_works(accelerator: SimPool) -> None:
    (first, seconds), (second, _) = accelerator.run(2, "lazy", interrupted)
    assert first[0].startswith("PeerFailed: rank 1 failed"), first
    assert "KeyboardInterrupt" in first[0]
    assert second[0].startswith("KeyboardInterrupt"), second
    assert first[1] == second[1] == ""
    assert seconds < SOON


def disagreeing(device: torch.device) -> tuple[str, str]:
    """Another number of microbatches on one rank; then the same on both."""
    rank = dist.get_rank()
    stage = PipelineStage(block(rank).to(device), rank, 2, device)
    x, y = (part.to(device) for part in batch(MICROBATCHES))
    said = []
    for count in (MICROBATCHES // (1 + rank), MICROBATCHES):
        try:
            Schedule1F1B(stage, count, loss_fn=squares).step(x, target=y)
            said.append("")
        except PenstockError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said[0], said[1]


def test_ranks_that_disagree_are_told_the_difference(accelerator: SimPool) -> None:
    for first, second in accelerator.run(2, "lazy", disagreeing):
        assert first.startswith("RanksDisagree"), first
        assert "microbatches" in first
        assert second == ""


def on_other_devices(device: torch.device, port: int, backend: str) -> list[str]:
    """Rank 1 is in host memory; then both are where the group can carry both."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    said = []
    for place in (device if rank == 0 else torch.device("cpu"), device):
        try:
            schedule = schedule_of(place, block(rank))
            x, y = (part.to(place) for part in batch(MICROBATCHES))
            schedule.step(x, target=y)
            said.append("")
        except PenstockError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("backend", ["cpu:gloo,sim:strict", "strict"])
def test_ranks_on_different_kinds_of_device_disagree_and_do_not_wait(sim: SimPool, backend: str) -> None:
    """Each waited for the other in another place: the one for connections, the one at its first meeting."""
    for first, second in sim.run(2, "lazy", on_other_devices, free_port(), backend):
        assert first.startswith("RanksDisagree: the stages of a pipeline are on different kinds of device"), first
        assert "(rank 0: sim, rank 1: cpu)" in first
        assert second == ""


def busy() -> None:
    time.sleep(2.5)


def computing(device: torch.device) -> tuple[list[str], float]:
    os.environ["PENSTOCK_HEARTBEAT"] = SHORT  # at which a rank that is stopped would be named
    try:
        return stepped(device, {1: busy}, steps=1)
    finally:
        del os.environ["PENSTOCK_HEARTBEAT"]


def test_a_rank_that_computes_for_several_heartbeats_is_left_alone(accelerator: SimPool) -> None:
    assert [found for found, _ in accelerator.run(2, "lazy", computing)] == [[""], [""]]


def late(device: torch.device) -> tuple[list[str], float]:
    transport = DistributedTransport.of(device=device)
    if transport.rank == 0:
        patient, transport.timeout = transport.timeout, 60.0

        def hurry() -> None:
            transport.timeout = 1.0

        assert patient > 1.0
        return stepped(device, {0: hurry}, steps=1)
    return stepped(device, {1: lambda: until(lambda: transport.failed)}, steps=1)


def test_a_wait_that_runs_out_says_where_everybody_was(accelerator: SimPool) -> None:
    (first, seconds), (second, _) = accelerator.run(2, "lazy", late)
    assert first[0].startswith("StepTimeout: "), first
    assert second[0].startswith("PeerFailed: rank 0 failed: StepTimeout"), second
    assert seconds < SOON


def slow_device(device: torch.device) -> str:
    """Rank 0 reads what its device has not done within the bound."""
    transport = DistributedTransport.of(device=device)
    stepped(device, {}, steps=1)
    if transport.rank == 0:
        patient, transport.timeout = transport.timeout, 0.5
        try:
            with held():
                transport.read(torch.ones(1, device=device))
        except PenstockError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            transport.timeout = patient
    return ""


def test_a_device_that_does_not_finish_is_an_error_with_the_table(sim: SimPool) -> None:
    told = sim.run(2, "lazy", slow_device)[0]
    assert told.startswith("StepTimeout: sim:0 did not finish within 0.5 s what it was told to do\nrank  step"), told
    assert "\n1 " in told


def breaks_its_device(device: torch.device) -> tuple[list[str], str]:
    """A kernel of rank 1 fails in a step; both ranks read something afterwards."""
    table, wrong = nn.Embedding(4, 2).to(device), torch.full((1,), 9, device=device)
    found, _ = stepped(device, {1: lambda: table(wrong)}, steps=1)
    try:
        DistributedTransport.of(device=device).read(torch.ones(1, device=device))
    except RuntimeError as error:
        return found, str(error)
    return found, ""


def test_an_error_of_the_device_surfaces_at_the_next_read_on_its_rank(sim: SimPool) -> None:
    """That a step has succeeded means that every host has issued it."""
    (first, fine), (second, told) = sim.run(2, "lazy", breaks_its_device)
    assert first == second == [""]
    assert fine == ""
    assert told.startswith("the device of rank 1 failed in step 2 or before: ")
    assert "index out of range" in told
    assert told.endswith("with PENSTOCK_BLOCKING=1 in the environment the action is named")


def breaks_its_device_in_turn(device: torch.device) -> list[str]:
    """The same while each action waits for its device."""
    table, wrong = nn.Embedding(4, 2).to(device), torch.full((1,), 9, device=device)
    os.environ["PENSTOCK_BLOCKING"] = "1"
    try:
        return stepped(device, {1: lambda: table(wrong)})[0]
    finally:
        del os.environ["PENSTOCK_BLOCKING"]


def test_an_action_that_waits_for_its_device_is_named_when_that_fails(sim: SimPool) -> None:
    first, second = sim.run(2, "eager", breaks_its_device_in_turn)
    assert first[0].startswith("PeerFailed: rank 1 failed in action 1F0 (stage 1, microbatch 0): DeviceFailed: "), first
    assert second[0].startswith("DeviceFailed: the device of rank 1 failed in action 1F0 of step 2: "), second
    assert "index out of range" in second[0]
    assert first[1] == second[1] == ""


def two_threads(device: torch.device) -> tuple[list[str], str]:
    """While one thread of rank 0 is in a step another one tries to be in one."""
    module = Acts()
    schedule = schedule_of(device, module)
    x, y = (part.to(device) for part in batch(MICROBATCHES))
    schedule.step(x, target=y)
    said: list[str] = []

    def intrude() -> None:
        def step() -> None:
            try:
                schedule.step(x, target=y)
            except PenstockError as error:
                said.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=step)
        thread.start()
        thread.join(SOON)

    if dist.get_rank() == 0:
        module.act = intrude
    schedule.step(x, target=y)
    return said, "fine"


def test_a_second_thread_is_refused(accelerator: SimPool) -> None:
    (said, fine), (_, also) = accelerator.run(2, "lazy", two_threads)
    assert len(said) == 1
    assert "while another thread of this process" in said[0]
    assert fine == also == "fine"


def loses_the_store(device: torch.device, port: int, among: bool) -> list[str]:
    """Rank 0 holds the store in its process and is killed in a step; it is a rank of the pipeline, or none of it."""
    os.environ["PENSTOCK_HEARTBEAT"] = "1"
    try:
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        dist.init_process_group("strict", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        group = None if among else dist.new_group([1, 2])
        if not among and rank == 0:
            _get_default_store().wait(["in a step"])
            die()
        module, place = Acts().to(device), rank if among else rank - 1
        stage = PipelineStage(module, place, size if among else 2, device, group=group)
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=squares)
        found = raised_in_steps(schedule, device, 1)

        def wait_for_the_end() -> None:
            _get_default_store().set("in a step", "")
            time.sleep(2.0)  # longer than the heartbeat; then it is gone for certain
            module.act = None

        module.act = None if place else die if among else wait_for_the_end
        found += raised_in_steps(schedule, device, 2)
        with suppress(RuntimeError):  # what was on an aborted communicator is lost, and the device says so
            torch.accelerator.synchronize()  # no stream is stuck
        return found
    finally:
        os.environ.pop("PENSTOCK_HEARTBEAT", None)


def test_the_first_rank_may_die_and_the_store_with_it(sim: SimPool) -> None:
    outcomes = sim.outcomes(2, "lazy", loses_the_store, free_port(), True)
    assert outcomes[0].exit_code == -signal.SIGKILL
    assert outcomes[1].ok, outcomes[1].details
    good, during, after = outcomes[1].value
    assert good == ""
    assert during.startswith("PeerFailed: rank 0 failed"), during
    assert "tart the job again" in after or "rank 0 failed" in after, after


def test_steps_go_on_without_the_process_that_held_the_store(sim: SimPool) -> None:
    outcomes = sim.outcomes(3, "lazy", loses_the_store, free_port(), False)
    assert outcomes[0].exit_code == -signal.SIGKILL
    for outcome in outcomes[1:]:
        assert outcome.ok, outcome.details
        assert outcome.value == ["", "", ""]


def test_both_sides_of_a_network_that_is_cut_are_told(sim: SimPool) -> None:
    """Over two network namespaces; the communicators of the device notice nothing, as NCCL's would not."""
    try:
        with two_hosts() as hosts:
            cut_the_network(hosts, "sim")
    except NoNamespaces as reason:
        pytest.skip(str(reason))
