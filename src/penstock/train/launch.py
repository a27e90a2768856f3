"""Start the ranks of a run through torch's elastic launcher, and start them again after a crash.

Under torchrun (`torchrun --nproc-per-node 2 -m penstock train ...`) the ranks are there already, and nothing is launched.

A crash is a rank that was killed, or that lost its connections. An exception in a rank's own program is none: it would come
again, so the run ends with it.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from importlib import import_module
from typing import Final

from penstock.errors import PenstockError
from penstock.train.owner import owned
from penstock.train.recovery import LOSS, note_loss, spread_over
from penstock.train.train_options import TrainOptions

RESTARTS: Final = "PENSTOCK_RESTARTS"  # in the environment of the ranks: how often they were started again
LOST: Final = 75  # the exit code of a rank that ends because another one is gone
GRACE: Final = 5.0  # seconds that such a rank leaves to the other to end first, with the reason
STOPPED: Final = 143  # the exit code of a task that SIGTERM has stopped with a checkpoint: the job can be queued again
_OF_SRUN: Final = {
    "SLURM_PROCID": "RANK",
    "SLURM_LOCALID": "LOCAL_RANK",
    "SLURM_NTASKS": "WORLD_SIZE",
}  # and torch's names


class Interrupted(Exception):
    """The run was stopped from outside."""


def is_rank() -> bool:
    """Whether this process was started as a rank by torchrun, or by `launch`."""
    return "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def restarts() -> int:
    """How often this run was started again after a crash, as far as this process was told."""
    return max(int(os.environ.get(name, "0")) for name in (RESTARTS, "TORCHELASTIC_RESTART_COUNT"))


def enter_slurm(environment: MutableMapping[str, str]) -> bool:
    """Say in torch's names what srun has said in its own; whether this process is a task of srun's.

    >>> given = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7"}
    >>> given |= {"SLURM_STEP_NODELIST": "gpu[03-04]"}
    >>> enter_slurm(given)
    True
    >>> given["RANK"], given["WORLD_SIZE"], given["MASTER_ADDR"], given["MASTER_PORT"]
    ('5', '8', 'gpu03', '20007')
    """
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    needed = {*_OF_SRUN, "SLURM_STEP_ID", "SLURM_JOB_ID"}
    if "RANK" in environment or hosts is None or not needed <= environment.keys():
        return False
    environment.update({name: environment[given] for given, name in _OF_SRUN.items()})
    environment.setdefault("MASTER_ADDR", first_host(hosts))
    environment.setdefault("MASTER_PORT", str(20_000 + int(environment["SLURM_JOB_ID"]) % 10_000))
    return True


def first_host(listed: str) -> str:
    """
    >>> first_host("node7"), first_host("gpu[003-017,20],login"), first_host("rack[2,4]-a"), first_host("r[1-2]n[07-09]")
    ('node7', 'gpu003', 'rack2-a', 'r1n07')
    """
    found = re.match(r"(?:[^,\[]|\[[^\]]*\])+", listed)
    if found is None:
        raise ValueError(f"{listed!r} names no host; expected what Slurm puts into SLURM_STEP_NODELIST")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", found[0])


def launch(options: TrainOptions, arguments: Sequence[str], *, say: Callable[[str], None]) -> None:
    """Run `python -m penstock train ARGUMENTS` as so many ranks, until they end; `say` hears of every restart."""
    with owned(options.folder):
        _launch(options, arguments, say)


def _launch(options: TrainOptions, arguments: Sequence[str], say: Callable[[str], None]) -> None:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    _hush()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ["TORCHELASTIC_LOG_LEVEL"] = "CRITICAL"
    processes = options.ranks * options.dp
    (options.folder / LOSS).unlink(missing_ok=True)  # of a run that nobody went on with
    for number in range(options.max_restarts + 1):
        os.environ[RESTARTS] = str(number)
        os.environ["OMP_NUM_THREADS"] = str(options.threads or max(1, (os.cpu_count() or 1) // processes))
        began = time.time()
        try:
            _launch_once(processes, arguments)
        except SignalException as stopped:
            raise Interrupted(f"stopped by {stopped.sigval.name}") from stopped
        except ChildFailedError as failed:
            rank, failure = failed.get_first_failure()
            how = how_it_ended(failure.exitcode)
            codes = [each.exitcode for each in failed.failures.values()]
            left = processes
            if options.min_ranks:
                left = math.prod(spread_over(options, processes - sum(map(was_killed, codes))))
            if number < options.max_restarts and is_crash(codes) and left:
                fewer = f" with {left} of {processes} ranks" if left < processes else ""
                processes = left
                note_loss(options, began)  # unless a rank has done so before it ended
                say(
                    f"rank {rank} {how}: starting again{fewer} from the last checkpoint "
                    f"({number + 1} of {options.max_restarts})"
                )
                continue
            after = f" after {number} restart{'' if number == 1 else 's'}" if number else ""
            kept = options.checkpoint.exists()
            hint = f" With --resume the run goes on from the last checkpoint in {options.folder}" if kept else ""
            raise PenstockError(f"rank {rank} {how}{after}; its output is above.{hint}") from failed
        return


def _hush() -> None:
    """What the launcher's loggers would say is said better here. Each has a level of its own, from when it was made."""
    import_module("torch.distributed.launcher.api")  # makes the last of them
    for name in ["torch.distributed.elastic", *logging.root.manager.loggerDict]:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _launch_once(ranks: int, arguments: Sequence[str]) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
        shutdown_timeout=60,
    )
    elastic_launch(config, sys.executable)("-m", "penstock", "train", *arguments)


def is_crash(exit_codes: Iterable[int]) -> bool:
    """Whether starting again may help: some rank was killed, and not by the launcher, or all have lost one another.

    >>> is_crash([-9, 1]), is_crash([75]), is_crash([1, 75]), is_crash([1, -15])
    (True, True, False, False)
    """
    codes = list(exit_codes)
    return any(map(was_killed, codes)) or all(code == LOST for code in codes)


def was_killed(exit_code: int) -> bool:
    """By a signal that did not come from the launcher, which ends the others with SIGTERM.

    >>> was_killed(-9), was_killed(-15), was_killed(75)
    (True, False, False)
    """
    return exit_code < 0 and exit_code != -signal.SIGTERM


def how_it_ended(exit_code: int) -> str:
    """
    >>> how_it_ended(-9), how_it_ended(1), how_it_ended(75)
    ('was killed by SIGKILL', 'ended with exit code 1', 'lost the other ranks')
    """
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return "lost the other ranks" if exit_code == LOST else f"ended with exit code {exit_code}"
