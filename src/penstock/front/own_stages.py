"""What this rank has of a pipeline: its stages, their tensors by the names of the user's model, and its place among the ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import NoReturn, Self, TypeVar, cast

from torch import Tensor, nn

from penstock.balance import Profile
from penstock.capture.stage_module import StageModule
from penstock.checks import check_types
from penstock.comm.collectives import Collectives
from penstock.comm.transport import Transport
from penstock.errors import RunError
from penstock.front.choice import Built, Choice
from penstock.front.choice_text import explanation
from penstock.front.loading import copy_state
from penstock.front.mesh import PipelineMesh
from penstock.front.names import StageTensors, prefixes_of, stage_tensors
from penstock.front.publish import Origin, save_pretrained
from penstock.front.sharing import Sharing
from penstock.run.ties import Holders, Tied, declared, holders_of
from penstock.simulate import Timeline
from penstock.stage.pipeline_stage import PipelineStage

_Method = TypeVar("_Method", bound=Callable[..., object])


def one_call(method: _Method) -> _Method:
    """Public calls of a pipeline come one at a time: refuse one while another thread is in one, or a step is under way.

    class Pipeline:
        @one_call
        def save(self, folder): ...
    """

    @wraps(method)
    def call(self: OwnStages, /, *args: object, **kwargs: object) -> object:
        with self.transport.called(f"{method.__name__}()"):
            return method(self, *args, **kwargs)

    return cast("_Method", call)


class OwnStages:
    """The stages of this rank. `Pipeline` is one that can also step."""

    rank: int  # of this process among the ranks of the pipeline
    num_ranks: int
    replica: int  # which of the data-parallel copies of the pipeline this rank belongs to, from 0
    num_replicas: int  # how many data-parallel copies of the pipeline there are
    is_first: bool  # whether this is the rank that writes files and speaks for all
    transport: Transport  # messages between the ranks of this pipeline
    _sharing: Sharing

    def __init__(self, built: Built, ends: PipelineMesh, origin: Origin, ties: Iterable[Tied | Holders]) -> None:
        self._built, self._ends, self._origin = built, ends, origin
        self.rank, self.num_ranks, self.transport = ends.rank, ends.num_ranks, ends.transport
        self.replica, self.num_replicas, self.is_first = ends.replica, ends.num_replicas, ends.is_first
        self._ties = _ties(built, ties)
        self._prefixes = prefixes_of(
            built.stages, ends, self._ties
        )  # here, where all ranks come: names are asked on one alone
        self._tensors: StageTensors | None = None

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse copy, deepcopy, pickle and torch.save, and say what to write instead."""
        raise RunError(
            f"a {type(self).__name__} is neither copied nor pickled: it is one rank's part of a model, and is connected to the "
            "other ranks. Write pipe.save(folder, optimizer=optimizer) for a checkpoint, which pipe.load(folder) and "
            "penstock.load(folder) read; torch.save(pipe.state_dict(), file) for the weights of this rank alone; for a second "
            "pipeline, a Pipeline of its own from copy.deepcopy(model)"
        )

    @property
    def stages(self) -> list[PipelineStage]:
        """The stages of this rank."""
        return list(self._built.stages)

    @property
    def profile(self) -> Profile | None:
        """What the layers cost; None for stages made by hand."""
        return None if self._built.choice is None else self._built.choice.profile

    @property
    def timeline(self) -> Timeline | None:
        """The step as predicted, by the measured costs; None for stages made by hand."""
        return None if self._built.choice is None else self._built.choice.timeline

    @property
    def tensors(self) -> StageTensors:
        """The parameters and buffers of this rank, by the names of the user's model."""
        if self._tensors is None:
            self._tensors = stage_tensors(self._built, self._ends, self._ties, self._prefixes)
        return self._tensors

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank, by their names in the user's model. What stages share is on each that uses it."""
        yield from self.tensors.all_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank, for an optimizer."""
        yield from (parameter for _, parameter in self.tensors.all_parameters())

    @one_call
    def train(self, mode: bool = True) -> Self:
        """Set the mode of the stages of this rank, as on the model."""
        check_types("train", RunError, mode=(mode, bool))
        for stage in self._built.stages:
            stage.submod.train(mode)
        return self

    def eval(self) -> Self:
        """Dropout off, batch norm by its statistics."""
        return self.train(False)

    @one_call
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As on a module."""
        check_types("zero_grad", RunError, set_to_none=(set_to_none, bool | int))
        for stage in self._built.stages:
            stage.submod.zero_grad(set_to_none)

    def explain(self, *, print_output: bool = True) -> str:
        """What was chosen and why: stages, schedule, predicted step time, bubble and memory. Rank 0 prints it."""
        text = explanation(self._built)
        if print_output and self._ends.is_first:
            sys.stdout.write(text)
            sys.stdout.flush()
        return text

    # -- what it holds, out and in

    @one_call
    def state_dict(self) -> dict[str, Tensor]:
        """The tensors of this rank's stages, by their names in the user's model; what names share, once."""
        return {name: value.detach() for name, value in self.tensors.state.items()}

    @one_call
    def load_state_dict(self, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Take this rank's tensors out of a state dict, of the whole model or of these stages."""
        check_types("load_state_dict", RunError, strict=(strict, bool | int))
        copy_state(self.tensors, state, strict=strict)
        if strict:
            self._sharing.renew()

    @one_call
    def save_pretrained(self, folder: str | Path, *, max_shard_bytes: int = 5_000_000_000) -> None:
        """Write the weights as sharded safetensors, each rank its own; for a transformers model with its config.

            pipe.save_pretrained("mine/")
            model = AutoModelForCausalLM.from_pretrained("mine/")        # without penstock

        All ranks call it. The names are those of the user's model, and what has several names is written once.
        """

        def look() -> Path:
            check_types(
                "save_pretrained", RunError, folder=(folder, str | PathLike), max_shard_bytes=(max_shard_bytes, int)
            )
            return Path(folder)

        place = self._ends.ready("save_pretrained()", look)
        save_pretrained(place, self.tensors, self._ends, self._origin, max_shard_bytes=max_shard_bytes)

    # -- for programs around a pipeline

    @property
    def choice(self) -> Choice | None:
        """What was chosen and among what; None for stages made by hand."""
        return self._built.choice

    @property
    def ranks(self) -> Collectives:
        """What all ranks of all replicas do together.

        folder = pipe.ranks.broadcast("a folder", make_folder)       # made on the first rank
        losses = pipe.ranks.all_gather("losses", loss)
        """
        return self._ends.ranks

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """All modules in evaluation mode; afterwards each is in the mode that it was in, frozen ones too."""
        stages = [stage.submod for stage in self._built.stages]
        before = [(module, module.training) for stage in stages for module in stage.modules()]
        captured = [(module, module.mode) for module, _ in before if isinstance(module, StageModule)]
        training = [stage for stage in stages if stage.training and not captured]
        for stage in stages:
            stage.eval()
        try:
            yield
        finally:
            for stage in training:
                stage.train()
            for module, mode in before:
                module.training = mode
            for part, graph in captured:
                part.mode = graph

    @property
    def _last_rank(self) -> int:
        return self._built.plan.placement.ranks[-1]

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters() if p.grad is not None]


def _ties(built: Built, given: Iterable[Tied | Holders]) -> list[tuple[tuple[int, str], ...]]:
    """Who holds what together: for names, norms and checkpoints."""
    if built.info is not None:
        return [shared.holders for shared in built.info.shared.values()]
    found = [*holders_of(given), *declared(built.stages)]
    return list(dict.fromkeys(tuple((stage, name) for stage, name in holders) for holders in found))
