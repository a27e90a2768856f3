"""`penstock train`: train a small GPT, or your own model, over pipelined processes."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Collection
from dataclasses import Field, fields
from typing import Any, get_args

import click

from penstock.cli import common_options
from penstock.train.train_options import KINDS, TrainOptions


class _RecordsArguments(click.Command):
    """Command that keeps its arguments in `ctx.obj`, to start the ranks with the same ones."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.obj = list(args)
        return super().parse_args(ctx, args)


def _option(one: Field[object]) -> click.Option:
    """Return the command-line option for a field of `TrainOptions`."""
    kind, about = (get_args(KINDS[one.name]) or (KINDS[one.name],))[0], one.metadata
    name = one.name.replace("_", "-")
    return click.Option(
        [f"--{name}/--no-{name}" if one.default is True else f"--{name}", *about["flags"]],
        is_flag=kind is bool,
        type=click.Path(exists=True) if about["metavar"] == "PATH" else kind,
        default=one.default,
        show_default=kind is not bool and one.default != "",
        metavar=about["metavar"],
        help=about["text"],
    )


@click.command(
    cls=_RecordsArguments,
    params=[
        click.Argument(["build"], required=False, metavar="[MODULE:FUNCTION]"),
        *map(_option, fields(TrainOptions)[1:]),
    ],
)
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> None:
    """Train over pipelined processes: a small GPT on real text, or the model that MODULE:FUNCTION returns.

    The function returns (model, data, loss, optimizer) and optionally validation batches as a fifth item. Data is a function
    of the step, a DataLoader or a list of (inputs, target); optimizer is a class or a function of the parameters. The function
    may also return a penstock.train.Job, which can set options of this command. If it has a parameter called options, it
    receives them.

    Ranks are started with torch's elastic launcher, and restarted from the last checkpoint if one is killed. Under torchrun,
    this command is one rank. Ctrl-C saves a checkpoint and stops.

    \b
    Examples:
      penstock train
      penstock train --ranks 4 --schedule zbv --steps 1000 -o runs/zbv
      penstock train my_module:build --microbatches 16 --precision bf16 --keep-best --log tensorboard
      penstock train --resume -o runs/zbv --steps 2000
      penstock train --ranks 2 --dp 2 --data-parallel fsdp
      penstock train --ranks 4 --device cuda
      torchrun --nnodes 2 --nproc-per-node 4 --rdzv-endpoint host0:29500 --rdzv-backend c10d -m penstock train
    """
    from penstock.train.launch import STOPPED, Interrupted, enter_slurm, is_rank, launch
    from penstock.train.loggers import check_logger
    from penstock.train.meet import check_where

    said = [name for name in given if common_options.was_given(name)]
    options = TrainOptions(**given).resumed(said)
    options.check_values()
    by_srun = enter_slurm(os.environ)
    if is_rank():
        finished = _be_rank(options, options.open_to_a_job(said))
        if by_srun and not finished:
            ctx.exit(STOPPED)
        return
    options.check()
    for name in options.loggers:
        check_logger(name)
    check_where(options)
    try:
        launch(options, ctx.obj, say=lambda text: click.echo(text, err=True))
    except Interrupted as stopped:
        click.echo(f"{stopped}; all processes have ended", err=True)
        ctx.exit(130)


def _be_rank(options: TrainOptions, undecided: Collection[str]) -> bool:
    """Run one rank, and return True if the run finished. The job may set the options in `undecided`.

    If another rank failed, wait for GRACE seconds, so that the failed rank reports its error first.
    """
    from penstock.errors import PeerFailed, PenstockError, StepTimeout, TransportError
    from penstock.train.history import note_loss
    from penstock.train.launch import GRACE, LOST
    from penstock.train.rank import run_rank

    began = time.time()
    try:
        return run_rank(options, undecided)
    except (PeerFailed, StepTimeout, TransportError) as error:
        note_loss(options, began)
        click.echo(f"Error: {error}", err=True)
        time.sleep(GRACE)
        sys.exit(LOST)
    except (PenstockError, OSError):
        raise
    except Exception:  # noqa: BLE001  the user's job may raise anything
        traceback.print_exc()  # without the frames of the command
        sys.exit(1)
