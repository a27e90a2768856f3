"""What a training run is asked for: one frozen value, from the command line to every rank."""

from __future__ import annotations

import json
import math
import sys
import typing
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from penstock.checks import fits
from penstock.errors import PenstockError, PlanError, SplitError
from penstock.plan.file_io import read_text
from penstock.schedules import get_schedule

OPTIONS = "options.json"  # in the output folder
OF_A_JOB: tuple[str, ...] = (  # what a job may bring
    *("accumulate", "checkpoint_every", "clip", "keep", "keep_best", "log", "microbatches", "patience", "precision"),
    *("rate_schedule", "schedule", "stages", "steps", "trace", "validate_every", "warmup"),
)
_LARGEST = 1 << 28  # bytes of a file that a run writes: a report has the times of every action
_MOST = 1 << 62
_PROCESSES = 1024  # that one command starts on its host, at the most
_Default = TypeVar("_Default")


def option(default: _Default, text: str, *flags: str, least: int = 0, words: str = "", metavar: str = "") -> _Default:
    """An option of the command: what it is without being given, its line of help, its short flags, the least number that it
    may be, or the words that there are."""
    kept = {"text": text, "flags": flags, "least": least, "words": words, "metavar": metavar or words or None}
    return field(default=default, metadata=kept)


@dataclass(frozen=True)
class TrainOptions:
    """All options of `penstock train`, which makes its own of these fields.

    TrainOptions(build="mine:build", ranks=4, steps=1000)
    """

    build: str | None = None  # "module:function" of the user, or None for the small GPT
    ranks: int = option(2, "Processes of a pipeline; under torchrun those that there are.", "-p", least=1)
    dp: int = option(1, "Replicas of the pipeline, of --ranks each.", least=1)
    data_parallel: str = option("ddp", "What keeps replicas alike.", words="ddp|fsdp")
    schedule: str = option("auto", "auto: the fastest; search: made to measure.", "-s", metavar="NAME")
    microbatches: int = option(8, "Microbatches of a batch.", "-m", least=1)
    stages: int | None = option(None, "Stages over all ranks.  [default: what suits the schedule]", least=1)
    steps: int = option(300, "Steps to train.", "-n")
    size: str = option("small", "Of the GPT.", metavar="tiny|small|medium|large")
    batch: int = option(16, "Rows of the GPT's batch.", least=1)
    dropout: float = option(0.0, "Of the GPT.")
    learning_rate: float = option(3e-3, "Of the GPT's AdamW.")
    seed: int = option(0, "Of parameters, batches and dropout.", least=-_MOST)
    data: str | None = option(None, "A file or folder of text.  [default: Python's own sources]", metavar="PATH")
    output: str = option("runs/train", "Folder for checkpoint, log and report.", "-o")
    resume: bool = option(False, "Go on from the checkpoint in the output folder, with the options of that run.")
    checkpoint_every: int = option(50, "Steps between two; 0: only at the end.")
    recut: float = option(0.0, "Cut anew for a slow rank at a checkpoint, if that saves this share of a step.")
    keep: int = option(3, "Checkpoints that stay.", least=1)
    validate_every: int = option(40, "Steps between two validations; 0: never.")
    check_steps: int = option(3, "First steps, compared with the unpipelined model.")
    measure: bool = option(True, "Measure the layers before cutting, or cut by size.")
    sample: int = option(240, "Bytes that the GPT writes at the end.")
    max_restarts: int = option(3, "Restarts after a crash.")
    min_ranks: int = option(0, "Go on with the ranks that are left, so many a pipeline; 0: with all.")
    clip: float = option(1.0, "The largest norm of the gradients; 0: any.")
    rate_schedule: str | None = option(
        None, "Of the learning rate.  [default: what the job brings]", words="constant|linear|cosine"
    )
    warmup: int = option(0, "Steps in which the learning rate rises.")
    accumulate: int = option(1, "Batches for each step of the optimizer.", least=1)
    compile: bool = option(False, "Compile the stages with torch.compile, before the first step.")
    compile_backend: str = option("inductor", "Of torch.compile: any that torch knows.")
    precision: str = option("fp32", "Autocast; fp16 with a scaled loss.", words="fp32|bf16|fp16")
    validation: str | None = option(None, "Text to validate the GPT on.  [default: a part of the data]", metavar="PATH")
    patience: int = option(0, "End after so many validations without a better loss; 0: go to the end.")
    keep_best: bool = option(False, "Keep a checkpoint of the best validation loss, in OUTPUT/best.")
    log: str = option("", "jsonl, tensorboard, wandb, mlflow; several with commas.", metavar="NAMES")
    trace: int = option(0, "Steps to profile for OUTPUT/trace.json.")
    device: str = option("cpu", "Where ranks compute: cpu, cuda, or another kind.")
    backend: str | None = option(None, "Of torch.distributed.  [default: gloo on the CPU, nccl for cuda]")
    threads: int | None = option(None, "Threads of each rank.  [default: its share of the cores]", least=1)

    @property
    def folder(self) -> Path:
        return Path(self.output)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def loggers(self) -> list[str]:
        return [name.strip() for name in self.log.split(",") if name.strip()]

    def check_values(self) -> None:
        """Say which number or word cannot be, wherever it came from: the command line, a job, or the file of a run."""
        for one in fields(self):
            value, flag = getattr(self, one.name), f"--{one.name.replace('_', '-')}"
            _check_kind(one.name, value, flag)
            least, most = one.metadata.get("least", 0), math.inf if one.name == "clip" else _MOST
            if isinstance(value, int | float) and not least <= value <= most:  # a NaN neither
                raise PenstockError(f"{flag} {value}; expected a number from {least} to {most:,}")
            words = one.metadata.get("words", "").split("|")
            if words != [""] and value not in (None, *words):
                raise PenstockError(f"{flag} {value!r}; expected one of {', '.join(words)}")
        if self.dropout >= 1:
            raise PenstockError(f"--dropout {self.dropout}; expected less than 1")

    def check(self) -> None:
        """Say what cannot be before any process is started; what depends on the model is found later."""
        self.check_values()
        if self.ranks * self.dp > _PROCESSES:
            raise PenstockError(
                f"--ranks {self.ranks} and --dp {self.dp} are {self.ranks * self.dp} processes on this host; expected at most "
                f"{_PROCESSES}. On several hosts start them with torchrun or srun"
            )
        if self.schedule not in ("auto", "search"):
            get_schedule(self.schedule)
        if self.stages is not None and self.stages % self.ranks:
            raise PlanError(f"--stages {self.stages} over --ranks {self.ranks}; expected a multiple of {self.ranks}")
        if self.min_ranks > self.ranks:
            raise PlanError(f"--min-ranks {self.min_ranks} with --ranks {self.ranks}; expected no more than --ranks")
        if not 0 <= self.recut < 1 or (self.recut and (self.dp > 1 or not self.checkpoint_every)):
            raise PenstockError(
                f"--recut {self.recut:g} with --dp {self.dp} and --checkpoint-every {self.checkpoint_every}; expected a share "
                "of a step such as 0.1, one pipeline, and checkpoints"
            )
        if self.build is not None:
            _check_build(self.build)
        self.check_validated()
        if self.build is None:
            from penstock.train.gpt import size_of

            size_of(self.size)
            if self.batch % self.dp:
                raise SplitError(f"--batch {self.batch} rows over --dp {self.dp} replicas; expected as many for each")
            if self.batch < self.microbatches * self.dp:
                raise SplitError(
                    f"--batch {self.batch} rows for --microbatches {self.microbatches} of --dp {self.dp}; expected at "
                    "least a row for each"
                )

    def check_validated(self, batches: Collection[object] | None = None) -> None:
        """Say that what goes by the validation loss would wait for it in vain; the batches are known once there is a job."""
        if not self.patience and not self.keep_best:
            return
        if not self.validate_every:
            raise PenstockError("--patience and --keep-best go by the validation loss; give --validate-every as well")
        if batches is not None and not batches:
            raise PenstockError(
                f"--patience and --keep-best go by the validation loss, and {self.build} brings no batches to validate on; "
                "return (model, data, loss, optimizer, validation), or a penstock.train.Job with validation=[...]"
            )

    def dumps(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def of_file(cls, file: Path) -> TrainOptions:
        """The options that a run has written down."""
        data = read_json(file)
        for name, value in data.items():
            _check_kind(name, value, f"{file} says {name!r:.60}:")
        options = cls(**data)
        try:
            options.check_values()
        except PenstockError as error:
            raise PenstockError(f"{file}: {error}") from error
        return options

    def resumed(self, given: Collection[str]) -> TrainOptions:
        """With `resume`: the options that the run in the folder had, but for those that are `given` now."""
        file = self.folder / OPTIONS
        if not self.resume or not file.is_file():
            return self
        before = self.of_file(file)
        return replace(before, **{name: getattr(self, name) for name in {"resume", "output", *given}})

    def open_to_a_job(self, given: Collection[str]) -> frozenset[str]:
        """What a job may decide: what neither the command line nor the run that goes on has decided."""
        goes_on = self.resume and (self.folder / OPTIONS).is_file()
        return frozenset() if goes_on else frozenset(OF_A_JOB) - set(given)

    def with_those_of(self, job: Mapping[str, Any], undecided: Collection[str]) -> TrainOptions:
        """With what a job brings, as far as that is undecided.

        >>> TrainOptions(clip=2.0).with_those_of({"clip": 0.5, "precision": "bf16"}, ["precision"])
        TrainOptions(..., clip=2.0, ..., precision='bf16', ...)
        """
        if unknown := sorted(set(job) - set(OF_A_JOB)):
            raise PenstockError(f"a job with the option {unknown[0]!r}; expected some of {', '.join(OF_A_JOB)}")
        for name, value in job.items():
            _check_kind(name, value, f"a job with the option {name!r}:")
        made = replace(self, **{name: value for name, value in job.items() if name in undecided})
        made.check_values()
        return made


KINDS: dict[str, type] = typing.get_type_hints(TrainOptions)


def _check_kind(name: str, value: object, said: str) -> None:
    """Whether an option may be such a value at all."""
    kind = KINDS.get(name)
    is_bool = isinstance(value, bool)
    if kind is None or is_bool != (kind is bool) or not fits(value, kind):
        names = ["nothing" if one is type(None) else one.__name__ for one in typing.get_args(kind) or (kind,) if one]
        expected = f"expected {' or '.join(names)}" if names else "which is no option of penstock train"
        raise PenstockError(f"{said} {value!r:.60}; {expected}")


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file that a run has written."""
    text = read_text(file, PenstockError, limit=_LARGEST)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PenstockError(f"{file} cannot be read: {error}; if the run is lost, give another --output") from error
    if not isinstance(data, dict):
        raise PenstockError(f"{file} holds a {type(data).__name__}; expected what penstock train wrote there")
    return data


def _check_build(build: str) -> None:
    """That "module:function" can name something: the module is looked for, not imported."""
    module, _, function = build.partition(":")
    if not module or not function:
        raise PenstockError(f"{build!r} names no function; write module:function, for example my_module:build")
    package, here = module.partition(".")[0], str(Path.cwd())
    if not (package in sys.modules or PathFinder.find_spec(package, [here]) or find_spec(package)):
        raise PenstockError(
            f"{build!r}: there is no module {package!r} in {here}, nor is one installed; go to the folder of {package}.py, "
            "or put that folder on PYTHONPATH"
        )
