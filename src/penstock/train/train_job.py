"""What is trained: a model, its batches, its loss and its optimizer; penstock's own or the user's.

def build():                                   # my_module.py
    model = MyModel()
    def batches(step):                         # the same on every rank
        return inputs(step), labels(step)
    return model, batches, loss_fn, torch.optim.AdamW

penstock train my_module:build --ranks 4
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.front.companions import RandomNumbers, same_random_numbers
from penstock.nest import Value
from penstock.train.train_options import TrainOptions

if TYPE_CHECKING:
    from penstock.train.gpt import Text

Batch = tuple[tuple[Value, ...], Value]  # the model's arguments, and the target
_NOTHING, _HOST = object(), torch.device("cpu")
_OF_GPT = ("size", "batch", "dropout", "learning_rate", "data", "validation", "sample")  # options of the small GPT


@dataclass(frozen=True)
class Job:
    """One thing to train, with all that goes with it.

        return penstock.train.Job(model, loader, loss_fn, torch.optim.AdamW, options={"clip": 0.5, "precision": "bf16"})

    `batch` is a function of the step that gives the arguments of the model and the target, the same on every rank, or anything
    that can be run through again and again.
    """

    model: nn.Module
    batch: Value  # once `make_job` has it: a function of the step
    loss_fn: Callable[..., Tensor] | None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    validation: Sequence[Value] = ()  # batches
    rate: Callable[[int], float] | None = None  # the factor of the learning rate, by step
    options: Mapping[str, object] = field(default_factory=dict)  # of the command, unless it is called with others
    # What knows how far the data is: it has state_dict() and load_state_dict(), for checkpoints.
    position: object = None
    tokens: int = 0  # of a batch, for the speed; 0: rows are counted
    title: str = ""
    text: Text | None = field(default=None, repr=False)  # to generate from, for language models over bytes


def make_job(options: TrainOptions) -> Job:
    """The user's job, or the small GPT."""
    torch.manual_seed(options.seed)
    build = options.build or "penstock.train.gpt:build"
    builder, asks = _builder(build)
    made = builder(options=options) if asks else builder()
    if isinstance(made, tuple) and 4 <= len(made) <= 5:
        made = Job(*made)
    if not isinstance(made, Job):
        raise PenstockError(
            f"{build} returned {type(made).__name__}; expected (model, data, loss, optimizer), or with validation batches as a "
            "fifth, or a penstock.train.Job"
        )
    batch, position = batches_of(made.batch)
    count = sum(p.numel() for p in made.model.parameters())
    return replace(
        made,
        batch=batch,
        optimizer=_maker(made.optimizer),
        validation=[normal_batch(one) for one in made.validation],
        position=made.position or position,
        title=made.title or f"{type(made.model).__name__} of {count:,} parameters ({build})",
    )


def options_unheard(options: TrainOptions) -> str:
    """What to say of options that are the small GPT's, and were given for a model of the user's; nothing if all are heard."""
    usual = TrainOptions()
    given = [f"--{name.replace('_', '-')}" for name in _OF_GPT if getattr(options, name) != getattr(usual, name)]
    if options.build is None or not given or _builder(options.build)[1]:
        return ""
    return (
        f"not used: {', '.join(given)}; {options.build} makes model, data and optimizer by itself. To hear of them let it be "
        f"{options.build.partition(':')[2]}(options), a penstock.train.TrainOptions"
    )


def _builder(build: str) -> tuple[Callable[..., object], bool]:
    """The user's function, and whether it asks for the options."""
    module_name, _, function_name = build.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise PenstockError(f"{build!r} cannot be found: {error}") from error
    return found, "options" in inspect.signature(found).parameters


def _maker(optimizer: object) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """A function of a rank's parameters; an optimizer over the whole model becomes one of its kind."""
    if callable(optimizer):
        return optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PenstockError(
            f"the optimizer is a {type(optimizer).__name__}; return a class or a function: lambda parameters: AdamW(parameters)"
        )
    if len(optimizer.param_groups) != 1:
        raise PenstockError(
            "the optimizer has several groups; return a function that makes it from a rank's parameters"
        )
    kind, options = type(optimizer), dict(optimizer.defaults)
    accepted = inspect.signature(kind).parameters
    return lambda parameters: kind(parameters, **{k: v for k, v in options.items() if k in accepted})


def batches_of(data: Value) -> tuple[Callable[[int], Batch], Repeated | None]:
    """Batches by number, of a function or of what can be run through again and again; of the latter also its position."""
    source = None if callable(data) else Repeated(data)
    at = data if source is None else source.at
    return lambda number: normal_batch(at(number)), source


def normal_batch(batch: object) -> Batch:
    """(inputs, target): inputs may be one tensor or a tuple of the model's arguments."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise PenstockError(f"a batch is {type(batch).__name__}; expected (inputs, target)")
    inputs, target = batch
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), target


class Repeated:
    """Batches of an iterable, by number, with a position that goes into a checkpoint.

        source = Repeated(DataLoader(rows, batch_size=16, shuffle=True))
        source.at(0), source.at(1)                      # the same batches whoever asks, and however often
        state = source.state_dict()                     # a source that loads it goes on with number 2

    Data with state_dict() and load_state_dict(), as torchdata's StatefulDataLoader has them, says itself where it is. Any
    other is run through again up to where it was. Random numbers that the data draws (a shuffle, an augmentation) come from a
    stream of their own: they are the same on every rank, in a run that was resumed, and however many the model draws.
    """

    def __init__(self, data: Iterable[Value]) -> None:
        self.data = data
        self.knows_its_place = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
        if isinstance(data, Iterator) and not self.knows_its_place:
            raise PenstockError(
                f"the data is a {type(data).__name__}, which can be run through only once; return a list, a DataLoader, an "
                "object whose __iter__ begins anew, or one with state_dict() and load_state_dict()"
            )
        self._held: object = _NOTHING
        self._iterator: Iterator[object] = iter(())
        self._next = self._taken = 0
        self._random = self._begun = _first_numbers()
        self._at_start = self.state_dict()

    def at(self, number: int) -> Value:
        """Batch `number`, from 0 over all passes; cheapest in order. What comes after the end is the beginning."""
        if number == self._next - 1 and self._held is not _NOTHING:
            return self._held
        if number < self._next:
            self.load_state_dict(self._at_start)
        while self._next <= number:
            self._advance()
        return self._held

    def state_dict(self) -> dict[str, object]:
        """Where the data is."""
        own = self.data.state_dict() if self.knows_its_place else None  # type: ignore[attr-defined]
        return {"next": self._next, "taken": self._taken, "begun": self._begun, "random": self._random, "data": own}

    def load_state_dict(self, state: dict[str, Value]) -> None:
        """Go on from there."""
        self._next, self._taken, self._begun = state["next"], state["taken"], state["begun"]
        self._held = _NOTHING
        self._random = state["random" if self.knows_its_place else "begun"]
        if self.knows_its_place:
            self.data.load_state_dict(state["data"])  # type: ignore[attr-defined]
        with self._own_numbers():
            self._iterator = iter(self.data if self._taken or self.knows_its_place else ())
            for taken in range(0 if self.knows_its_place else self._taken):
                self._held = next(self._iterator, _NOTHING)
                if self._held is _NOTHING:
                    raise PenstockError(
                        f"the data ended after {taken} batches, and the run had taken {self._taken} of them; resume with the "
                        "same data"
                    )

    def _advance(self) -> None:
        with self._own_numbers():
            self._held = next(self._iterator, _NOTHING)
            if self._held is _NOTHING:
                self._taken, self._begun = 0, RandomNumbers(_HOST).state_dict()
                self._iterator = iter(self.data)
                self._held = next(self._iterator, _NOTHING)
        if self._held is _NOTHING:
            raise PenstockError("the data holds no batch; expected at least one in every pass")
        self._next += 1
        self._taken += 1

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """Inside, torch, Python and numpy draw from the stream of the data."""
        with same_random_numbers(_HOST):
            RandomNumbers(_HOST).load_state_dict(self._random)
            try:
                yield
            finally:
                self._random = RandomNumbers(_HOST).state_dict()


def _first_numbers() -> dict[str, object]:
    """The first numbers of the stream: they follow from torch's seed, which is the same on every rank."""
    seed = torch.initial_seed() % 2**32
    with same_random_numbers(_HOST):
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        return RandomNumbers(_HOST).state_dict()
