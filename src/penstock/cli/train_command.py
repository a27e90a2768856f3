"""`penstock train`: train a small GPT, or a model of one's own, over pipelined processes."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.train.train_options import TrainOptions

_AT_LEAST_ONE = click.IntRange(min=1)
_FROM_ZERO = click.IntRange(min=0)
_GIVEN = "penstock.train.given"


class _Told(click.Command):
    """Keeps what it was called with, which the ranks are called with again: by a shell, or by a program as `main([...])`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_GIVEN] = list(args)
        return super().parse_args(ctx, args)


@click.command(cls=_Told)
@click.argument("build", required=False, metavar="[MODULE:FUNCTION]")
@click.option("--ranks", "-p", type=_AT_LEAST_ONE, default=2, show_default=True, help="Processes of a pipeline.")
@click.option(
    "--dp", type=_AT_LEAST_ONE, default=1, show_default=True, help="Replicas of the pipeline, of --ranks each."
)
@click.option(
    "--data-parallel", default="ddp", metavar="ddp|fsdp", show_default=True, help="What keeps replicas alike."
)
@click.option(
    "--schedule",
    "-s",
    default="auto",
    metavar="NAME",
    show_default=True,
    help="auto: the fastest; search: made to measure.",
)
@click.option("--microbatches", "-m", type=_AT_LEAST_ONE, default=8, show_default=True, help="Microbatches of a batch.")
@click.option("--stages", type=_AT_LEAST_ONE, help="Stages over all ranks.  [default: what suits the schedule]")
@click.option("--steps", "-n", type=_FROM_ZERO, default=300, show_default=True, help="Steps to train.")
@click.option("--size", default="small", metavar="tiny|small|medium|large", show_default=True, help="Of the GPT.")
@click.option("--batch", type=_AT_LEAST_ONE, default=16, show_default=True, help="Rows of the GPT's batch.")
@click.option(
    "--dropout", type=click.FloatRange(0, 1, max_open=True), default=0.0, show_default=True, help="Of the GPT."
)
@click.option(
    "--learning-rate", type=click.FloatRange(min=0), default=3e-3, show_default=True, help="Of the GPT's AdamW."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of parameters, batches and dropout.")
@click.option("--data", type=click.Path(exists=True), help="A file or folder of text.  [default: Python's own sources]")
@click.option("--output", "-o", default="runs/train", show_default=True, help="Folder for checkpoint, log and report.")
@click.option(
    "--resume", is_flag=True, help="Go on from the checkpoint in the output folder, with the options of that run."
)
@click.option(
    "--checkpoint-every", type=_FROM_ZERO, default=50, show_default=True, help="Steps between two; 0: only at the end."
)
@click.option("--recut", type=float, default=0.0, help="Cut anew for a slow rank, if that saves this share of a step.")
@click.option("--keep", type=_AT_LEAST_ONE, default=3, show_default=True, help="Checkpoints that stay.")
@click.option(
    "--validate-every", type=_FROM_ZERO, default=40, show_default=True, help="Steps between two validations; 0: never."
)
@click.option(
    "--check-steps",
    type=_FROM_ZERO,
    default=3,
    show_default=True,
    help="First steps, compared with the unpipelined model.",
)
@click.option("--measure/--no-measure", default=True, help="Measure the layers before cutting, or cut by size.")
@click.option("--sample", type=_FROM_ZERO, default=240, show_default=True, help="Bytes that the GPT writes at the end.")
@click.option("--max-restarts", type=_FROM_ZERO, default=3, show_default=True, help="Restarts after a crash.")
@click.option("--min-ranks", type=_FROM_ZERO, default=0, help="Go on with the ranks that are left, so many a pipeline.")
@click.option(
    "--clip",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    help="The largest norm of the gradients; 0: any.",
)
@click.option(
    "--rate-schedule", metavar="constant|linear|cosine", help="Of the learning rate.  [default: what the job brings]"
)
@click.option("--warmup", type=_FROM_ZERO, default=0, show_default=True, help="Steps in which the learning rate rises.")
@click.option(
    "--accumulate", type=_AT_LEAST_ONE, default=1, show_default=True, help="Batches for each step of the optimizer."
)
@click.option("--compile", is_flag=True, help="Compile the stages with torch.compile, before the first step.")
@click.option(
    "--compile-backend", default="inductor", show_default=True, help="Of torch.compile: any that torch knows."
)
@click.option(
    "--precision",
    default="fp32",
    metavar="fp32|bf16|fp16",
    show_default=True,
    help="Autocast; fp16 with a scaled loss.",
)
@click.option(
    "--validation", type=click.Path(exists=True), help="Text to validate the GPT on.  [default: a part of the data]"
)
@click.option(
    "--patience",
    type=_FROM_ZERO,
    default=0,
    show_default=True,
    help="End after so many validations without a better loss; 0: go to the end.",
)
@click.option("--keep-best", is_flag=True, help="Keep a checkpoint of the best validation loss, in OUTPUT/best.")
@click.option("--log", default="", metavar="NAMES", help="jsonl, tensorboard, wandb, mlflow; several with commas.")
@click.option("--trace", type=_FROM_ZERO, default=0, show_default=True, help="Steps to profile for OUTPUT/trace.json.")
@click.option("--device", default="cpu", show_default=True, help="Where ranks compute: cpu, cuda, or another kind.")
@click.option("--backend", help="Of torch.distributed.  [default: gloo on the CPU, nccl for cuda]")
@click.option("--threads", type=_AT_LEAST_ONE, help="Threads of each rank.  [default: its share of the cores]")
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> None:
    """Train over pipelined processes: a small GPT on real text, or what MODULE:FUNCTION returns.

    The function returns (model, data, loss, optimizer), and if you like batches to validate on as a fifth: data is a function
    of the step, a DataLoader or a list of (inputs, target), optimizer a class or a function of the parameters. It may also
    return a penstock.train.Job, which can bring options of this command. A function with an argument called options is
    given them.

    Ranks are started with torch's elastic launcher, and started again from the last checkpoint if one is killed; under torchrun
    this command is one rank. Ctrl-C stops with a checkpoint.

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
    from penstock.train.launch import Interrupted, is_rank, launch
    from penstock.train.slurm import STOPPED, enter_slurm
    from penstock.train.train_options import TrainOptions
    from penstock.train.update import check_names
    from penstock.train.where import check_where

    default = click.core.ParameterSource.DEFAULT
    said = [name for name in given if ctx.get_parameter_source(name) is not default]
    options = TrainOptions(**given).resumed(said)
    options.check_values()
    by_srun = enter_slurm(os.environ)
    if is_rank():
        finished = _be_rank(options, options.open_to_a_job(said))
        if by_srun and not finished:
            ctx.exit(STOPPED)
        return
    options.check()
    check_names(options)
    check_where(options)
    try:
        launch(options, ctx.meta[_GIVEN], say=lambda text: click.echo(text, err=True))
    except Interrupted as stopped:
        click.echo(f"{stopped}; nothing is left running", err=True)
        ctx.exit(130)


def _be_rank(options: TrainOptions, undecided: Collection[str]) -> bool:
    """One rank; whether the run went to its end. Its job may decide what is undecided.

    If it ends only because another one is gone, that one may end first, and say why.
    """
    from penstock.errors import PeerFailed, StepTimeout, TransportError
    from penstock.train.launch import GRACE, LOST
    from penstock.train.rank import run_rank
    from penstock.train.recovery import note_loss

    began = time.time()
    try:
        return run_rank(options, undecided)
    except (PeerFailed, StepTimeout, TransportError) as error:
        note_loss(options, began)
        click.echo(f"Error: {error}", err=True)
        time.sleep(GRACE)
        sys.exit(LOST)
