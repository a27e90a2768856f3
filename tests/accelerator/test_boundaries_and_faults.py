"""Types and devices at boundaries, failures, and measured time, on the simulated accelerator."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.comm import DistributedTransport
from penstock.errors import PenstockError
from penstock.lower import InTurn
from penstock.run import Schedule1F1B
from penstock.stage.pipeline_stage import PipelineStage
from tests.accelerator.pipes import ROWS, batch, block
from tests.accelerator.pipes import expected as plain_gradients
from tests.accelerator.pool import Mode, SimPool
from tests.faults.fragile import SOON, when_all_others_have_come
from tests.run import test_conjugates as conjugates

MICROBATCHES = 4
BOTH = pytest.mark.parametrize("mode", ["lazy", "eager"])


def squares(output: Any, target: Tensor) -> Tensor:
    difference = (output if isinstance(output, Tensor) else output[0]) - target
    return (difference * difference).mean()


def schedule_of(device: torch.device, module: nn.Module, queues: str = "direction") -> Schedule1F1B:
    """With communicators for each direction, for each pair, or one for all."""
    stage = PipelineStage(module.to(device), dist.get_rank(), dist.get_world_size(), device)
    receives = None if queues == "direction" else InTurn(queues)  # type: ignore[arg-type]  # one of the layouts
    return Schedule1F1B(stage, MICROBATCHES, loss_fn=getattr(module, "loss", squares), receives=receives)


def raised_in_steps(schedule: Schedule1F1B, device: torch.device, count: int) -> list[str]:
    x, y = (part.to(device) for part in batch(MICROBATCHES))
    found = []
    for _ in range(count):
        try:
            schedule.step(x, target=y)
            found.append("")
        except (PenstockError, ArithmeticError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


class Sends(nn.Module):
    """A first stage that also sends a tensor of a type that communicators do not know; the second one uses it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = block(dist.get_rank()), dtype

    def forward(self, x: Tensor, extra: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if extra is None:
            extra = torch.arange(ROWS, device=x.device).to(self.dtype)
        else:
            x = x + extra.to(torch.int64).to(x.dtype).sum()
        return self.inner(x), extra


def odd_types(device: torch.device, dtype: torch.dtype) -> list[str]:
    return raised_in_steps(schedule_of(device, Sends(dtype)), device, 3)


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool])
def test_types_that_communicators_lack_travel_as_bytes(accelerator: SimPool, dtype: torch.dtype) -> None:
    assert accelerator.run(2, "eager", odd_types, dtype) == [["", "", ""]] * 2


def complex_ones(device: torch.device, view: str) -> dict[str, Tensor]:
    return conjugates.trained(dist.get_rank(), None, device, view)


def test_complex_tensors_travel_as_bytes(accelerator: SimPool) -> None:
    """Plain ones: the simulated device has no kernels for conjugated views."""
    conjugates.compare(accelerator.run(2, "lazy", complex_ones, "plain"), "plain")


class LeavesTheDevice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.wrong = block(dist.get_rank()), True

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x.cpu() if self.wrong and dist.get_rank() == 0 else x


def wrong_device(device: torch.device) -> list[str]:
    module = LeavesTheDevice()
    schedule = schedule_of(device, module)
    found = raised_in_steps(schedule, device, 1)
    module.wrong = False
    found += raised_in_steps(schedule, device, 2)
    module.wrong = True
    return found + raised_in_steps(schedule, device, 1)


@BOTH
def test_a_tensor_in_host_memory_is_refused_before_anything_is_sent(accelerator: SimPool, mode: Mode) -> None:
    first, second = accelerator.run(2, mode, wrong_device)
    assert first[0].startswith(
        "ShapeError: the output of stage 0 for microbatch 0 is (float64[2, 8] with gradient in host"
    )
    assert second[0].startswith("PeerFailed: rank 0 failed in action 0SEND_F0") or "ShapeError" in second[0]
    assert first[1:3] == second[1:3] == ["", ""]  # all messages of the failed step are out of the way
    assert "ShapeError" in first[3]
    assert "ShapeError" in second[3]


class Trips(nn.Module):
    """Does something in its second step: in the forward or backward of a microbatch, in a hook of it, or in its loss."""

    def __init__(self, do: Any, where: str = "forward") -> None:
        super().__init__()
        self.inner, self.do, self.where, self.forwards = block(dist.get_rank()), do, where, 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        now = self.forwards == MICROBATCHES + 2
        if now and self.where == "forward":
            self.do()
        y: Tensor = self.inner(x)
        if now and self.where == "hook":
            y.register_hook(lambda _: self.do())
        return InBackward.apply(y, self.do) if now and self.where == "backward" else y

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.forwards == MICROBATCHES + 2 and self.where == "loss":
            self.do()
        return squares(output, target)


class InBackward(torch.autograd.Function):
    """The same tensor; something is done in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, do: Any) -> Tensor:
        ctx.do = do
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.do()
        return grad.clone(), None


def fail() -> None:
    raise ArithmeticError("on purpose")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def nothing() -> None:
    """What the others do."""


def in_trouble(
    device: torch.device, victim: int, do: Any, queues: str = "direction", where: str = "forward"
) -> tuple[list[str], float]:
    os.environ["PENSTOCK_HEARTBEAT"] = "1"
    try:
        rank = dist.get_rank()
        schedule = schedule_of(device, Trips(do if rank == victim else nothing, where), queues)
        pids = [
            int(pid)
            for pid in DistributedTransport.of(device=device).collectives.all_bytes("pids", str(os.getpid()).encode())
        ]
        found = raised_in_steps(schedule, device, 1)
        start = time.monotonic()
        found += raised_in_steps(schedule, device, 2)
        seconds = time.monotonic() - start
        with suppress(RuntimeError):  # what was on an aborted communicator is lost, and the device says so
            torch.accelerator.synchronize()  # no stream is stuck
        if do is stop and when_all_others_have_come(victim):
            os.kill(pids[victim], signal.SIGCONT)
        return found, seconds
    finally:
        del os.environ["PENSTOCK_HEARTBEAT"]


LAYOUTS = pytest.mark.parametrize(
    ("mode", "queues"), [("lazy", "direction"), ("eager", "direction"), ("lazy", "pair"), ("eager", "one")]
)


@LAYOUTS
def test_an_exception_is_named_everywhere_and_the_next_step_works(
    accelerator: SimPool, mode: Mode, queues: str
) -> None:
    _check_exception(accelerator.run(3, mode, in_trouble, 1, fail, queues), victim=1)


@pytest.mark.parametrize(("where", "victim"), [("backward", 1), ("hook", 1), ("loss", 2)])
def test_so_is_one_in_a_backward_a_hook_or_the_loss(accelerator: SimPool, where: str, victim: int) -> None:
    _check_exception(accelerator.run(3, "eager", in_trouble, victim, fail, "direction", where), victim=victim)


def _check_exception(told: list[tuple[list[str], float]], *, victim: int) -> None:
    for rank, (found, seconds) in enumerate(told):
        assert found[0] == found[2] == ""
        if rank == victim:
            assert found[1] == "ArithmeticError: on purpose"
        else:
            assert found[1].startswith(f"PeerFailed: rank {victim} failed"), found
            assert "ArithmeticError: on purpose" in found[1]
        assert seconds < SOON


@pytest.mark.parametrize(
    ("mode", "queues", "do"),
    [("lazy", "direction", die), ("eager", "direction", stop), ("lazy", "pair", stop), ("eager", "one", die)],
)
def test_a_rank_that_dies_or_stops_is_named_and_no_stream_stays_stuck(
    accelerator: SimPool, mode: Mode, queues: str, do: Any
) -> None:
    outcomes = accelerator.outcomes(3, mode, in_trouble, 1, do, queues)
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank].details
        found, seconds = outcomes[rank].value
        assert found[0] == ""
        assert found[1].startswith("PeerFailed: rank 1 failed"), found
        assert "tart the job again" in found[2] or "rank 1 failed" in found[2], found
        assert seconds < SOON


def leaves(device: torch.device, queues: str, *, lost: bool = False) -> list[str]:
    """Rank 1 goes away between two steps, perhaps since its device is lost."""
    schedule = schedule_of(device, block(dist.get_rank()), queues)
    found = raised_in_steps(schedule, device, 1)
    if dist.get_rank() == 1:
        transport = DistributedTransport.of(device=device)
        if lost:
            transport.device = torch.device("cuda")  # a device that cannot even be asked
            with pytest.raises(RuntimeError, match="cuda"):
                transport.close()
        transport.close()
        return found
    found += raised_in_steps(schedule, device, 2)
    with suppress(RuntimeError):  # what was on an aborted communicator is lost, and the device says so
        torch.accelerator.synchronize()  # no stream is stuck
    return found


@LAYOUTS
def test_a_rank_that_leaves_between_steps_is_named(accelerator: SimPool, mode: Mode, queues: str) -> None:
    told = accelerator.run(3, mode, leaves, queues)
    assert [found[0] for found in told] == [""] * 3
    for rank in (0, 2):
        assert told[rank][1].startswith("PeerFailed: rank 1 failed: it left after step 1"), told[rank]
        assert "tart the job again" in told[rank][2] or "rank 1 failed" in told[rank][2], told[rank]


def leaves_without_a_device(device: torch.device) -> list[str]:
    return leaves(device, "direction", lost=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device that is lost is one that this machine must not have")
def test_a_rank_whose_device_is_lost_still_says_that_it_leaves(sim: SimPool) -> None:
    told, _ = sim.run(2, "lazy", leaves_without_a_device)
    assert told[1].startswith("PeerFailed: rank 1 failed: it left after step 1"), told


def wakes_up(device: torch.device, queues: str) -> dict[str, Any]:
    """Rank 1 is stopped in a step and goes on when the others have given it up; then all of them train."""
    os.environ["PENSTOCK_HEARTBEAT"] = "1"
    try:
        rank = dist.get_rank()
        module = Trips(stop if rank == 1 else nothing)
        schedule = schedule_of(device, module, queues)
        pids = [
            int(pid)
            for pid in DistributedTransport.of(device=device).collectives.all_bytes("pids", str(os.getpid()).encode())
        ]
        found = raised_in_steps(schedule, device, 2)
        if when_all_others_have_come(1):
            os.kill(pids[1], signal.SIGCONT)
        module.zero_grad()
        found += raised_in_steps(schedule, device, 1)
        grads = {f"{rank}.{name}": p.grad.cpu() for name, p in module.inner.named_parameters() if p.grad is not None}
        mine = torch.ones(1, device=device)
        dist.all_reduce(mine)  # the user's group is as it was
        return {"found": found, "grads": grads, "sum": mine.item()}
    finally:
        del os.environ["PENSTOCK_HEARTBEAT"]


@pytest.mark.parametrize(("mode", "queues"), [("lazy", "direction"), ("eager", "one")])
def test_when_all_processes_live_the_next_step_makes_new_communicators(
    accelerator: SimPool, mode: Mode, queues: str
) -> None:
    told = accelerator.run(3, mode, wakes_up, queues)
    grads = {key: grad for each in told for key, grad in each["grads"].items()}
    wanted = plain_gradients(3, MICROBATCHES)
    assert grads.keys() == wanted.keys()
    for key, grad in wanted.items():
        torch.testing.assert_close(grads[key], grad, msg=key)
    for rank, each in enumerate(told):
        assert each["found"][0] == each["found"][2] == ""
        who = "rank 1 failed: its process has been stopped" if rank != 1 else ""  # which does not know that it slept
        assert each["found"][1].startswith(f"PeerFailed: {who}"), each["found"]
        assert each["sum"] == 3.0


KERNEL = 0.004  # seconds


def machine(device: torch.device) -> dict[str, float | None]:
    """What is found out before a schedule is chosen, where every kernel takes its time and the host takes hardly any."""
    from penstock.capture import LayerSetting, pipeline, profile_layers
    from penstock.front.machine import measure_machine
    from penstock.front.mesh import PipelineMesh
    from tests.accelerator.device import load

    load().set_kernel_time(KERNEL)
    try:
        ends = PipelineMesh.of(None, None, device)
        found = measure_machine(ends)
        x = batch(1)[0].to(device).requires_grad_()
        setting = LayerSetting((x,), {}, device)
        layers = profile_layers(pipeline(block(0).to(device), (x,)), None, setting, progress=False)
    finally:
        load().set_kernel_time(0.0)
    forward = sum(layer.forward for layer in layers.layers)
    return {"overhead": found.overhead, "bandwidth": found.bandwidth, "forward": forward}


def test_what_is_measured_is_time_of_the_device_and_not_of_launching(sim: SimPool) -> None:
    for found in sim.run(2, "lazy", machine):
        assert found["overhead"] > KERNEL
        assert found["forward"] > 4 * KERNEL  # two linear layers, tanh and the norm
        assert found["bandwidth"] is None or found["bandwidth"] < 1e11


class Lasts(torch.autograd.Function):
    """A kernel of known length in the forward and one in the backward, each between two events of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: dict[str, list[Any]]) -> Tensor:
        ctx.kernels = kernels
        Lasts.run(kernels["F"], FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        Lasts.run(ctx.kernels["B"], BACKWARD)
        return grad.clone(), None

    @staticmethod
    def run(kernels: list[Any], seconds: float) -> None:
        from tests.accelerator.device import load

        events = [torch.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        load().busy(seconds)
        events[1].record()
        kernels.append(events)


class Known(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.kernels: dict[str, list[Any]] = {"F": [], "B": []}
        self.lasts = False

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return Lasts.apply(x, self.kernels) if self.lasts else x


FORWARD, BACKWARD = 0.15, 0.3  # seconds: a fifth is more than another process keeps a thread of the device waiting


def measured(device: torch.device) -> tuple[float, dict[str, list[tuple[float, float]]]]:
    """The makespan; and of each action of this rank how long it seemed to be, and how long its kernel was."""
    module, rank = Known(), dist.get_rank()
    schedule = schedule_of(device, module)
    raised_in_steps(schedule, device, 1)
    module.lasts = True
    with schedule.record() as recording:
        raised_in_steps(schedule, device, 1)
    torch.accelerator.synchronize()
    found = {}
    for kind, kernels in module.kernels.items():
        spans = [span for span in recording.timeline.spans(rank) if str(span.action).startswith(f"{rank}{kind}")]
        seen = [span.end - span.start for span in sorted(spans, key=lambda span: span.start)]
        own = [first.elapsed_time(last) / 1e3 for first, last in kernels]
        found[kind] = list(zip(seen, own, strict=True))
    return recording.timeline.makespan, found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_measured_timeline_is_that_of_the_kernels(sim: SimPool, ranks: int) -> None:
    """No action is seen as shorter than its kernel, and those that nothing disturbs as hardly longer. A rank that was alone was
    timed by the host, which is done long before its device: its actions took no time."""
    for makespan, found in sim.run(ranks, "eager", measured):
        for kind, length in (("F", FORWARD), ("B", BACKWARD)):
            assert len(found[kind]) == MICROBATCHES
            assert all(length <= own <= seen for seen, own in found[kind]), found
            assert sorted(seen - own for seen, own in found[kind])[1] <= 0.2 * length, found
        assert makespan > sum(seen for pairs in found.values() for seen, _ in pairs)
