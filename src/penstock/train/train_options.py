"""What a training run is asked for: one frozen value, from the command line to every rank."""

from __future__ import annotations

import json
import math
import sys
import typing
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError, PlanError, SplitError
from penstock.misfits import fits
from penstock.plan.reading import read_text
from penstock.schedules import get_schedule

OPTIONS = "options.json"  # in the output folder
OF_A_JOB: tuple[str, ...] = (  # what a job may bring
    *("accumulate", "checkpoint_every", "clip", "keep", "keep_best", "log", "microbatches", "patience", "precision"),
    *("rate_schedule", "schedule", "stages", "steps", "trace", "validate_every", "warmup"),
)
_LARGEST = 1 << 28  # bytes of a file that a run writes: a report has the times of every action
_FROM_ONE = ("ranks", "dp", "microbatches", "stages", "batch", "keep", "accumulate", "threads")
_MOST = 1 << 62
_PROCESSES = 1024  # that one command starts on its host, at the most


@dataclass(frozen=True)
class TrainOptions:
    """All options of `penstock train`.

    TrainOptions(build="mine:build", ranks=4, steps=1000)
    """

    build: str | None = None  # "module:function" of the user, or None for the small GPT
    ranks: int = 2  # of a pipeline; under torchrun its number of processes counts
    dp: int = 1  # data-parallel replicas of the pipeline, each with its share of the rows
    data_parallel: str = "ddp"  # or "fsdp": what the replicas are
    schedule: str = "auto"
    microbatches: int = 8
    stages: int | None = None  # over all ranks; None: what suits the schedule
    steps: int = 300
    size: str = "small"  # of the GPT, see penstock.train.gpt.SIZES
    batch: int = 16  # rows of a batch
    dropout: float = 0.0
    learning_rate: float = 3e-3
    seed: int = 0
    data: str | None = None  # a file or folder of text; None: the sources of the Python standard library
    output: str = "runs/train"
    resume: bool = False
    keep: int = 3  # checkpoints that stay, the newest included
    checkpoint_every: int = 50  # 0: only at the end, and when stopped
    recut: float = 0.0  # at a checkpoint, cut anew if a slow rank makes steps longer by this share; 0: the cut stays
    validate_every: int = 40  # 0: never
    check_steps: int = 3  # compared with the unpipelined model before training; 0: not
    measure: bool = True  # profile the layers, to cut and choose by; False: cut by size
    sample: int = 240  # bytes of generated text at the end
    max_restarts: int = 3  # after a crash, from the last checkpoint
    min_ranks: int = 0  # when a rank is killed go on with those that are left, so many for a pipeline; 0: with all
    clip: float = 1.0  # the largest norm of the gradients; 0: they are not clipped
    rate_schedule: str | None = None  # see penstock.train.update.RATES; None: what the job brings
    warmup: int = 0  # steps in which the learning rate rises, with a rate schedule
    accumulate: int = 1  # batches for each step
    precision: str = "fp32"  # of the computation: fp32, bf16 or fp16
    compile: bool = False  # the stages, with torch.compile
    compile_backend: str = "inductor"  # of torch.compile
    validation: str | None = None  # a file or folder of text to validate the GPT on; None: a part of the data
    patience: int = 0  # validations without a better loss until the run ends; 0: it goes to its end
    keep_best: bool = False  # a checkpoint of the best validation loss
    log: str = ""  # loggers beside log.jsonl, by name, with commas between them
    trace: int = 0  # steps at the end that torch's profiler sees on all ranks, for trace.json; 0: none
    threads: int | None = None  # of each rank; None: its share of the cores
    device: str = "cpu"  # the kind of device of every rank: "cpu", "cuda"
    backend: str | None = None  # of torch.distributed; None: that of the device

    @property
    def folder(self) -> Path:
        return Path(self.output)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def best(self) -> Path:
        return self.folder / "best"

    @property
    def loggers(self) -> list[str]:
        return [name.strip() for name in self.log.split(",") if name.strip()]

    def check_values(self) -> None:
        """Say which number or word cannot be, wherever it came from: the command line, a job, or the file of a run."""
        for name, value in asdict(self).items():
            _check_kind(name, value, f"--{name.replace('_', '-')}")
            least = 1 if name in _FROM_ONE else -_MOST if name == "seed" else 0
            most = math.inf if name == "clip" else _MOST
            if isinstance(value, int | float) and not least <= value <= most:  # a NaN neither
                raise PenstockError(f"--{name.replace('_', '-')} {value}; expected a number from {least} to {most:,}")
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
        if self.data_parallel not in ("ddp", "fsdp"):
            raise PenstockError(f"--data-parallel {self.data_parallel!r}; expected ddp or fsdp")
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


_KINDS: dict[str, object] = typing.get_type_hints(TrainOptions)


def _check_kind(name: str, value: object, said: str) -> None:
    """Whether an option may be such a value at all."""
    kind = _KINDS.get(name)
    is_bool = isinstance(value, bool)
    if kind is None or is_bool != (kind is bool) or not fits(value, kind):
        expected = "which is no option of penstock train" if kind is None else f"expected {_spelled(kind)}"
        raise PenstockError(f"{said} {value!r:.60}; {expected}")


def _spelled(kind: object) -> str:
    """The name of a kind, for example "int or nothing"."""
    return " or ".join("nothing" if one is type(None) else one.__name__ for one in typing.get_args(kind) or (kind,))


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
    known = package in sys.modules or PathFinder.find_spec(package, [here]) or find_spec(package)
    if not known:
        raise PenstockError(
            f"{build!r}: there is no module {package!r} in {here}, nor is one installed; go to the folder of {package}.py, "
            "or put that folder on PYTHONPATH"
        )
