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
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Final

from penstock.checkpoint import kept
from penstock.errors import PenstockError
from penstock.train.history import LOSS, RANKS, note_loss
from penstock.train.owner import owned
from penstock.train.train_options import TrainOptions

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

RESTARTS: Final = "PENSTOCK_RESTARTS"  # in the environment of the ranks: how often they were started again
LOST: Final = 75  # the exit code of a rank that ends because another one is gone
GRACE: Final = 5.0  # seconds that such a rank leaves to the other to end first, with the reason
STOPPED: Final = 143  # the exit code of a task that SIGTERM has stopped with a checkpoint: the job can be queued again
# What srun says, and torch's names for it.
_OF_SRUN: Final = {"SLURM_PROCID": "RANK", "SLURM_LOCALID": "LOCAL_RANK", "SLURM_NTASKS": "WORLD_SIZE"}


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
    _hush()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ["TORCHELASTIC_LOG_LEVEL"] = "CRITICAL"
    processes = options.ranks * options.dp
    with owned(options.folder):
        for name in (LOSS, RANKS):  # of a run that nobody went on with, or has ended
            (options.folder / name).unlink(missing_ok=True)
        for number in range(options.max_restarts + 1):
            os.environ[RESTARTS] = str(number)
            os.environ["OMP_NUM_THREADS"] = str(options.threads or max(1, (os.cpu_count() or 1) // processes))
            began = time.time()
            failed = _launch_once(processes, arguments)
            if failed is None:
                return
            left = _left(options, processes, failed) if number < options.max_restarts else 0
            rank, failure = failed.get_first_failure()
            how = f"rank {rank} {how_it_ended(failure.exitcode)}"
            if not left:
                after = f" after {number} restart{'' if number == 1 else 's'}" if number else ""
                saved = kept.is_any(options.checkpoint)
                hint = f" With --resume the run goes on from the last checkpoint in {options.folder}" if saved else ""
                raise PenstockError(f"{how}{after}; its output is above.{hint}") from failed
            fewer = f" with {left} of {processes} ranks" if left < processes else ""
            processes = left
            note_loss(options, began)  # unless a rank has done so before it ended
            say(f"{how}: starting again{fewer} from the last checkpoint ({number + 1} of {options.max_restarts})")


def _left(options: TrainOptions, processes: int, failed: ChildFailedError) -> int:
    """With how many ranks the run can go on; 0: not at all."""
    codes = [each.exitcode for each in failed.failures.values()]
    if not is_crash(codes) or not options.min_ranks:
        return processes if is_crash(codes) else 0
    return math.prod(spread_over(options, processes - sum(map(was_killed, codes))))


def _hush() -> None:
    """What the launcher's loggers would say is said better here. Each has a level of its own, from when it was made."""
    import_module("torch.distributed.launcher.api")  # makes the last of them
    for name in ["torch.distributed.elastic", *logging.root.manager.loggerDict]:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _launch_once(ranks: int, arguments: Sequence[str]) -> ChildFailedError | None:
    """How it failed, if a rank did not go to its end."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="penstock",  # the store has a port of its own, so no other run can see it
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        shutdown_timeout=60,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "penstock", "train", *arguments)
    except SignalException as stopped:
        raise Interrupted(f"stopped by {stopped.sigval.name}") from stopped
    except ChildFailedError as failed:
        return failed
    return None


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


def spread_over(options: TrainOptions, ranks: int, *, all_of_them: bool = False) -> tuple[int, int]:
    """Replicas, and ranks of each, for the ranks that are left: (0, 0) if --min-ranks do not remain for a pipeline.

    Replicas are given up only if the pipelines would be shorter than --min-ranks otherwise, and so many that the rows of a
    batch come out even. `all_of_them`: no rank may be left over.

    >>> four = TrainOptions(ranks=2, dp=2, min_ranks=1)
    >>> spread_over(four, 3), spread_over(replace(four, min_ranks=2), 3), spread_over(replace(four, min_ranks=2), 1)
    ((2, 1), (1, 2), (0, 0))
    """
    for replicas in range(options.dp, 0, -1):
        each = min(options.ranks, ranks // replicas)
        whole = each * replicas == ranks or not all_of_them
        if each >= max(options.min_ranks, 1) and options.dp % replicas == 0 and whole:
            return replicas, each
    return 0, 0


def fitted(options: TrainOptions, ranks: int) -> TrainOptions:
    """The options for the ranks that there are now: replicas, and stages that do not suit them, are chosen anew.

    >>> fitted(TrainOptions(ranks=3, stages=3, min_ranks=2), 2).stages is None
    True
    >>> fitted(TrainOptions(ranks=2, dp=2, min_ranks=2), 2).dp
    1
    """
    if not options.min_ranks:
        return options
    grown = replace(options, ranks=max(options.ranks, ranks))  # under torchrun a pipeline has the ranks that there are
    replicas, each = spread_over(grown, ranks, all_of_them=True)
    if not replicas:
        raise PenstockError(
            f"{ranks} ranks are left{f' for --dp {options.dp} replicas or fewer' if options.dp > 1 else ''}, and --min-ranks "
            f"{options.min_ranks} were asked for; the run ends"
        )
    fits = options.stages is None or options.stages % each == 0
    return replace(options, dp=replicas, stages=options.stages if fits else None)
