"""A rank that is stopped, or whose host is gone, keeps its connections open and says nothing: the heartbeat names it.

The story: with the network between two hosts cut for good both ranks were silent until the timeout of the group, and the one
whose store was on the other host stayed so for ever. SIGSTOP did the same on one host.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.comm import DistributedTransport
from penstock.errors import PenstockError, TransportError
from penstock.health.rendezvous import heartbeat
from penstock.run import ScheduleGPipe
from penstock.stage.pipeline_stage import PipelineStage
from tests.faults.fragile import SOON, loss_fn, make_batch, make_modules, until, when_all_others_have_come
from tests.gloo_pool import GlooPool

SHORT = "0.5"  # the shortest heartbeat that there is
pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]


def stepping(rank: int, num_ranks: int, device: str = "cpu") -> tuple[ScheduleGPipe, Any]:
    """A schedule after its first step."""
    module = make_modules(num_ranks, [])[rank].to(device)
    schedule = ScheduleGPipe(PipelineStage(module, rank, num_ranks, torch.device(device)), 4, loss_fn=loss_fn)
    x, y = (part.to(device) for part in make_batch(8))
    schedule.step(x, target=y)
    return schedule, module


def raised_in_steps(schedule: ScheduleGPipe, count: int, device: str = "cpu") -> list[str]:
    x, y = (part.to(device) for part in make_batch(8))
    found = []
    for _ in range(count):
        try:
            schedule.step(x, target=y)
            found.append("")
        except PenstockError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def stopped_in_a_step(victim: int, heartbeat: str) -> tuple[list[str], float]:
    """The victim stops itself in its second step; when all others have raised, they let it go on."""
    os.environ["PENSTOCK_HEARTBEAT"] = heartbeat
    rank = dist.get_rank()
    try:
        schedule, module = stepping(rank, 3)
        transport = DistributedTransport.of()
        pids = [int(post) for post in transport.collectives.all_bytes("processes", str(os.getpid()).encode())]
        if rank == victim:

            def stop_once(*_: Any) -> None:
                handle.remove()
                os.kill(os.getpid(), signal.SIGSTOP)

            handle = module.register_forward_pre_hook(stop_once)
        start = time.monotonic()
        found = raised_in_steps(schedule, 2)
        seconds = time.monotonic() - start
        if when_all_others_have_come(victim):
            os.kill(pids[victim], signal.SIGCONT)
        return found, seconds
    finally:
        del os.environ["PENSTOCK_HEARTBEAT"]


@pytest.mark.parametrize(("victim", "heartbeat"), [(1, SHORT), (0, "1")])
def test_a_stopped_rank_is_named_within_the_heartbeat(gloo_pool: GlooPool, victim: int, heartbeat: str) -> None:
    """Though the group would wait for 30 minutes; and the next step says that the job must be started again."""
    results = gloo_pool.run(3, stopped_in_a_step, victim, heartbeat, group_timeout=1800.0)
    for rank, (found, seconds) in enumerate(results):
        if rank != victim:
            assert found[0].startswith(f"PeerFailed: rank {victim} failed: its process has been stopped for"), found
            assert "tart the job again" in found[1] or "has been stopped" in found[1], found
            assert seconds < SOON


def busy_in_a_step() -> list[str]:
    """Rank 1 computes for several heartbeats without ever letting go of Python's lock: it is busy, not lost."""
    os.environ["PENSTOCK_HEARTBEAT"] = SHORT
    try:
        schedule, module = stepping(dist.get_rank(), 2)
        if dist.get_rank() == 1:
            start, number = time.monotonic(), 10**6
            while time.monotonic() - start < 0.1:  # how many numbers take that long is a matter of the machine
                number *= 2
                start = time.monotonic()
                sum(range(number))

            def compute(module: Any, args: Any) -> None:
                handle.remove()
                sum(range(20 * number))

            handle = module.register_forward_pre_hook(compute)
        return raised_in_steps(schedule, 1)
    finally:
        del os.environ["PENSTOCK_HEARTBEAT"]


def test_a_rank_that_computes_for_long_is_left_alone(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(2, busy_in_a_step) == [[""], [""]]


@pytest.mark.parametrize("given", ["ten", "-1", "inf", "nan", "0.4"])
def test_a_heartbeat_that_is_no_number_of_seconds_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("PENSTOCK_HEARTBEAT", given)
    with pytest.raises(PenstockError, match="expected seconds such as 10"):
        heartbeat()


# -- two hosts


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


class NoNamespaces(Exception):
    """This machine makes no network namespaces; the text says why."""


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them, at 10.231.9.1 and 10.231.9.2."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        raise NoNamespaces("two network namespaces need root and the program `ip` (package iproute2)")
    names = [f"penstock{os.getpid()}{letter}" for letter in "ab"]
    cables = [f"ps{os.getpid() % 100000}{letter}" for letter in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for number, (name, cable) in enumerate(zip(names, cables, strict=True), start=1):
            ip("-n", name, "addr", "add", f"10.231.9.{number}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names[0], names[1]
    except subprocess.CalledProcessError as error:
        raise NoNamespaces(f"this machine makes no network namespaces: {error.stderr.decode().strip()}") from error
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=30)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    try:
        with two_hosts() as names:
            yield names
    except NoNamespaces as reason:
        pytest.skip(str(reason))


def train_on_a_host(rank: int, device: str) -> None:
    """A program: one step, then word that the network may be cut, then two steps."""
    if device == "sim":
        from tests.accelerator.device import load

        load()
    (cable,) = [path.name for path in Path("/sys/class/net").iterdir() if path.name.startswith("ps")]
    os.environ["GLOO_SOCKET_IFNAME"] = cable
    backend = "strict" if device == "sim" else "gloo"
    dist.init_process_group(backend, init_method="tcp://10.231.9.1:29544", rank=rank, world_size=2)
    schedule, _ = stepping(rank, 2, device)
    raised_in_steps(schedule, 1, device)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    start = time.monotonic()
    found = raised_in_steps(schedule, 2, device)
    sys.stdout.write(f"{time.monotonic() - start:.1f}\n" + "".join(text.replace("\n", " ") + "\n" for text in found))
    sys.stdout.flush()
    os._exit(0)  # the group's own farewell would wait for the other host


def start_on(host: str, program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PENSTOCK_HEARTBEAT": "2"},
    )


def test_both_sides_of_a_network_that_is_cut_are_told(hosts: tuple[str, str]) -> None:
    cut_the_network(hosts)


def pull_the_cable(hosts: tuple[str, str]) -> None:
    (cable,) = subprocess.run(
        ["ip", "-n", hosts[0], "-o", "link", "show", "type", "veth"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    ip("-n", hosts[0], "link", "set", cable.split(":")[1].split("@")[0].strip(), "down")


def cut_the_network(hosts: tuple[str, str], device: str = "cpu") -> None:
    """A rank on each host, a step, and the cable out: both sides must say so."""
    program = "from tests.faults.test_heartbeat import train_on_a_host; train_on_a_host({rank}, {device!r})"
    programs = [start_on(host, program.format(rank=rank, device=device)) for rank, host in enumerate(hosts)]
    dog = threading.Timer(100.0, lambda: [program.kill() for program in programs])
    dog.start()
    try:
        ready = [program.stdout.readline() for program in programs if program.stdout is not None]
        assert ready == ["ready\n", "ready\n"]
        pull_the_cable(hosts)
        texts = [one.communicate("go\n")[0].splitlines() for one in programs]
    finally:
        dog.cancel()
        for program in programs:
            program.kill()
            program.wait(30)
    for rank, (seconds, first, second) in enumerate(texts):
        assert first.startswith(f"PeerFailed: rank {1 - rank} failed"), first
        assert "Start the job again" in second, second
        assert float(seconds) < SOON


def wait_on_a_host(rank: int, ends: str) -> None:
    """A program: rank 1 computes, as if it captured a model, and ends; what rank 0 hears, which waits for it."""
    (cable,) = [path.name for path in Path("/sys/class/net").iterdir() if path.name.startswith("ps")]
    os.environ["GLOO_SOCKET_IFNAME"] = cable
    dist.init_process_group("gloo", init_method="tcp://10.231.9.1:29544", rank=rank, world_size=2)
    transport = DistributedTransport.of()
    if rank == 1:
        sys.stdin.readline()
        if ends == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60.0)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    start, said = time.monotonic(), ""
    try:
        transport.collectives.all_bytes("the layers of the model", b"")
    except PenstockError as error:
        said = f"{type(error).__name__}: {error}"
    sys.stdout.write(f"{time.monotonic() - start:.1f}\n{said}\n")
    sys.stdout.flush()
    os._exit(0)


@pytest.mark.parametrize(
    "ends", ["killed", pytest.param("cut off", marks=pytest.mark.long("the network of hosts that step is cut above"))]
)
def test_a_rank_on_another_host_that_is_gone_before_the_first_step_is_named(hosts: tuple[str, str], ends: str) -> None:
    """Nothing passes between hosts before the first step, so that whoever waited there did so for the timeout of the group."""
    program = "from tests.faults.test_heartbeat import wait_on_a_host; wait_on_a_host({rank}, {ends!r})"
    programs = [start_on(host, program.format(rank=rank, ends=ends)) for rank, host in enumerate(hosts)]
    dog = threading.Timer(100.0, lambda: [one.kill() for one in programs])
    dog.start()
    try:
        assert programs[0].stdout is not None
        assert programs[1].stdin is not None
        assert programs[0].stdout.readline() == "ready\n"
        programs[1].stdin.write("go\n")
        programs[1].stdin.flush()
        if ends == "cut off":
            pull_the_cable(hosts)
        seconds, said = programs[0].communicate()[0].splitlines()
    finally:
        dog.cancel()
        for one in programs:
            one.kill()
            one.communicate(timeout=30)
    assert said.startswith(
        "PeerFailed: rank 1 failed: its " + ("process has ended" if ends == "killed" else "host is out of reach")
    )
    assert float(seconds) < SOON


def left_alone() -> str:
    """Rank 0 is killed with the store in it; what rank 1 prints, and torch for it, is caught."""
    rank = dist.get_rank()
    schedule, module = stepping(rank, 2)
    if rank == 0:
        module.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    log = Path(f"/tmp/penstock-{os.getpid()}.log")
    kept = os.dup(2)
    with log.open("w") as file:
        os.dup2(file.fileno(), 2)
        try:
            found = raised_in_steps(schedule, 3)
            time.sleep(1.0)
            DistributedTransport.of().close()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    text = log.read_text()
    log.unlink()
    assert found[0].startswith("PeerFailed: rank 0 failed"), found
    assert all("Start the job again" in again for again in found[1:]), found
    return text


def test_the_death_of_the_store_does_not_flood_the_terminal(gloo_pool: GlooPool) -> None:
    """Each call of a store that was gone made torch print a page; nobody calls it any more."""
    _, second = gloo_pool.outcomes(2, left_alone, store="tcp")
    assert second.ok, second.details
    assert second.value.count("frame #") == 0, second.value


def wait_until_stopped(process: int) -> None:
    """Until each of its threads is: the one that answers for the store may be the last."""
    threads = Path(f"/proc/{process}/task")
    until(lambda: all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in threads.glob("*/stat")))


def killed_under_a_call() -> str:
    """Rank 0 is stopped with the store in it, and killed when rank 1 waits for an answer; what torch prints of it."""
    store = DistributedTransport.of().store
    if dist.get_rank() == 0:
        store.set("process", str(os.getpid()).encode())
        time.sleep(60.0)
    process, said = int(store.get("process", 30.0)), list[str]()

    def call() -> None:
        try:
            store.check("anything")
        except TransportError as error:
            said.append(str(error))

    with tempfile.TemporaryFile("w+") as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            os.kill(process, signal.SIGSTOP)
            wait_until_stopped(process)
            caller = threading.Thread(target=call)
            caller.start()
            time.sleep(0.3)
            os.kill(process, signal.SIGKILL)
            caller.join(30.0)
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        printed = file.read()
    assert said, "the call came back"
    assert "does not answer" in said[0], said
    return printed


def test_a_call_that_is_under_way_when_the_store_dies_prints_nothing(gloo_pool: GlooPool) -> None:
    """Nobody called a store that was gone, but on a busy machine a call was often under way when it went: a page for each
    connection of each rank."""
    _, second = gloo_pool.outcomes(2, killed_under_a_call, store="tcp")
    assert second.ok, second.details
    assert second.value == ""


def dies_before_its_first_step() -> str:
    transport = DistributedTransport.of()
    if transport.rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        transport.collectives.all_bytes("what a checkpoint holds", b"")
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_that_is_killed_before_the_first_step_is_named(gloo_pool: GlooPool) -> None:
    """While a model was captured, measured or loaded nobody knew which processes the others were: whoever waited for one that was
    killed there, for lack of memory say, waited for the timeout of the group."""
    first, _, third = gloo_pool.outcomes(3, dies_before_its_first_step)  # a store that no rank takes along when it ends
    for outcome in (first, third):
        assert outcome.ok, outcome.details
        assert outcome.value == "PeerFailed: rank 1 failed: its process has ended"
