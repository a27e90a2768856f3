"""Start the ranks of a run through torch's elastic launcher, and start them again after a crash.

Under torchrun (`torchrun --nproc-per-node 2 -m penstock train ...`) the ranks are there already, and nothing is launched.
"""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Sequence

from penstock.errors import PenstockError
from penstock.train.options import TrainOptions


class Interrupted(Exception):
    """The run was stopped from outside."""


def is_rank() -> bool:
    """Whether this process was started as a rank by torchrun, or by `launch`."""
    return "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def launch(options: TrainOptions, arguments: Sequence[str]) -> None:
    """Run `python -m penstock train ARGUMENTS` as so many ranks, until they end."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    threads = options.threads or max(1, (os.cpu_count() or 1) // options.ranks)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ["TORCHELASTIC_LOG_LEVEL"] = "ERROR"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=options.ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=options.max_restarts,
        monitor_interval=0.2,
        shutdown_timeout=60,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "penstock", "train", *arguments)
    except SignalException as stopped:
        raise Interrupted(f"stopped by {stopped.sigval.name}") from stopped
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        restarts = f" after {options.max_restarts} restarts" if options.max_restarts else ""
        raise PenstockError(
            f"rank {rank} ended with exit code {failure.exitcode}{restarts}; its output is above. With --resume the run goes on "
            f"from the last checkpoint in {options.folder}"
        ) from failed
