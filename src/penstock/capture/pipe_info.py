"""What everybody may know about a captured model.

info = pipe.info()
info.num_stages, info.inputs.names, info.edges          # 4, ("x", "mask"), {(0, 1), (1, 2), (0, 2)}
info.shared["wte.weight"].holders                       # ((0, "wte.weight"), (3, "lm_head.weight"))
info.cut_by, print(info.cuts)                           # with num_stages=: "costs measured on cpu", and their table
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.balance import Cuts
from penstock.capture.arguments import InputTable, ModelCall, model_values
from penstock.capture.wires import Wire
from penstock.errors import CaptureError
from penstock.nest import Nest, Value, leaf_names


@dataclass(frozen=True)
class Shared:
    """One parameter or buffer that several stages use, each under a name of the user's model.

    pipe.info().shared["embed.weight"].holders  # ((0, "embed.weight"), (3, "head.weight"))
    """

    owner: int  # the stage whose copy counts: in a norm, in a checkpoint
    name: str  # its name there
    holders: tuple[tuple[int, str], ...]  # every (stage, name), the owner first
    is_parameter: bool = True  # False for a buffer, which has no gradient


@dataclass(frozen=True)
class PipeInfo:
    """The captured model without its tensors. Plain data: it can be compared, printed and saved.

    pipe.info().num_stages
    """

    num_stages: int
    inputs: InputTable
    stage_inputs: tuple[tuple[Wire, ...], ...]
    stage_outputs: tuple[tuple[Wire, ...], ...]  # of the last stage: the leaves of the model's output
    shared: Mapping[str, Shared]
    output_paths: tuple[str, ...]  # of the output leaves, tensors and traced sizes, as a user would write them
    loss_index: int | None  # which tensor of the output is the model's own loss
    why_static: str = ""  # why the batch size could not be kept open
    model: str = ""  # names, shapes and types of what all stages hold, in a few words
    cuts: Cuts | None = None  # with num_stages=: the table of the stages and what each costs
    cut_by: str = ""  # what these costs are: measured where, estimated how and why
    uneven: str = ""  # which stage takes more than 1.5 times the mean, and where it could be cut

    @property
    def has_loss(self) -> bool:
        return self.loss_index is not None

    @property
    def edges(self) -> frozenset[tuple[int, int]]:
        """(producer, user) for every pair of stages between which something travels."""
        return frozenset(
            (wire.source, stage)
            for stage, wires in enumerate(self.stage_inputs)
            for wire in wires
            if wire.source is not None
        )

    def loss_of(self, output: object) -> Value:
        """The model's own loss, out of what the model returned."""
        if self.loss_index is None:
            raise CaptureError(
                f"the model returns no loss that can be told from its other outputs ({', '.join(self.output_paths)}); "
                "capture with output_loss_value_spec={'loss': True}, or give the schedule a loss_fn"
            )
        return model_values.flatten(output)[0][self.loss_index]

    def arguments(self, stage: int, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, Value]:
        """The model's arguments that a stage reads, out of a call; a rank may leave out what its stages do not read."""
        return self.arguments_of_each(stage, [(args, kwargs)])[0]

    def arguments_of_each(self, stage: int, calls: Sequence[ModelCall]) -> list[dict[str, Value]]:
        """The same for several calls of one form, such as the microbatches of a step."""
        wanted = [wire.name for wire in self.stage_inputs[stage] if wire.source is None]
        found = self.inputs.bind_each(calls) if wanted else [{} for _ in calls]
        missing = [name for name in wanted if name not in found[0]]
        if missing:
            taken = next((name for name in missing if name in STEPS_OWN), None)
            instead = (
                "" if taken is None else f". {taken}= is an argument of step itself: give the model's by its place"
            )
            raise CaptureError(
                f"stage {stage} reads {', '.join(missing)}, and this rank's call does not give it; pass the same "
                f"arguments on every rank, or at least {', '.join(wanted)} here{instead}"
            )
        return [{name: given[name] for name in wanted} for given in found]


STEPS_OWN = ("target", "outputs", "losses", "return_outputs", "loss_kwargs")
"""Names that `step` takes for itself. A model may have arguments of the same names."""


def find_loss(recipe: Nest, wires: Sequence[Wire], *, fixed: Sequence[int], spec: object) -> int | None:
    """Which tensor of the output is the loss: the one that `spec` marks with True, else a single number called "loss".

    `fixed` are the places of the leaves that have no wire, because they are always the same.
    """
    paths = leaf_names(recipe)
    travelling = iter(wires)
    leaves = [None if place in fixed else next(travelling) for place in range(len(paths))]
    tensors = [place for place, wire in enumerate(leaves) if wire is not None and wire.kind == "tensor"]
    if spec is not None:
        marked = _marked(spec, "")
        wanted = [i for i in tensors if paths[i] in marked or (marked == [""] and len(paths) == 1)]
        if len(wanted) != 1:
            raise CaptureError(
                f"output_loss_value_spec={spec!r} marks {len(wanted)} of the model's outputs ({', '.join(paths)}); it "
                "must mark exactly one with True, for example {'loss': True}"
            )
        return tensors.index(wanted[0])
    for number, place in enumerate(tensors):
        wire = leaves[place]
        if wire is not None and wire.shape == () and paths[place].rpartition(".")[2] == "loss":
            return number
    return None


def _marked(spec: object, path: str) -> list[str]:
    if spec is True:
        return [path.removeprefix(".")]
    if isinstance(spec, Mapping):
        return [p for key, value in spec.items() for p in _marked(value, f"{path}.{key}")]
    if isinstance(spec, list | tuple):
        return [p for i, value in enumerate(spec) for p in _marked(value, f"{path}[{i}]")]
    return []


@dataclass(frozen=True)
class StageRoutes:
    """The wires of one stage, as the runtime asks for them (``penstock.stage.routes.Routes``)."""

    info: PipeInfo
    stage: int

    @property
    def edges(self) -> Iterable[tuple[int, int]]:
        """(producer, consumer) for every pair of stages between which something travels."""
        return self.info.edges

    @property
    def wires(self) -> str:
        """All that travels, in one line: the same on ranks that cut the same model at the same places."""
        inputs = enumerate(self.info.stage_inputs)
        return ", ".join(
            f"{wire.source}>{k} {wire.name}" for k, wires in inputs for wire in wires if wire.source is not None
        )

    @property
    def model(self) -> str:
        """What all stages hold, in a few words: the same on ranks that have captured the same model."""
        return self.info.model

    @property
    def has_loss(self) -> bool:
        """Whether the model returns its own loss."""
        return self.info.has_loss

    def loss_of(self, output: object) -> Value:
        """The model's own loss, out of what the model returned."""
        return self.info.loss_of(output)

    @property
    def ties(self) -> list[tuple[tuple[int, str], ...]]:
        """The holders of each parameter that several stages use."""
        return [shared.holders for shared in self.info.shared.values() if shared.is_parameter]

    def wanted_on(self, producer: int, consumers: Iterable[int]) -> tuple[int, ...]:
        """Which outputs of `producer` these stages read, by their place: each crosses once, however many read it."""
        wanted = set(consumers)
        outputs = self.info.stage_outputs[producer]
        return tuple(place for place, wire in enumerate(outputs) if wanted & set(wire.stages))

    def call(
        self, values: Mapping[int, Mapping[int, Value]], args: tuple[Value, ...], kwargs: dict[str, Value]
    ) -> tuple[tuple[Value, ...], dict[str, Value]]:
        """The inputs of the stage, in its order."""
        (own,) = self.bind([args], [kwargs], 1)
        return tuple(
            own[position] if source is None else values[source][place]
            for position, (source, place) in enumerate(self.sources)
        ), {}

    def bind(
        self, args: Sequence[tuple[object, ...]] | None, kwargs: Sequence[dict[str, object]], num_microbatches: int
    ) -> Sequence[Sequence[Value]]:
        """For each microbatch the inputs of the stage, with None where another stage's value goes."""
        names = [wire.name if wire.source is None else "" for wire in self.info.stage_inputs[self.stage]]
        if not any(names):
            return [[None] * len(names)] * num_microbatches
        calls = [(args[m] if args else (), kwargs[m] if kwargs else {}) for m in range(num_microbatches)]
        each = self.info.arguments_of_each(self.stage, calls)
        return [[given[name] if name else None for name in names] for given in each]

    @cached_property
    def sources(self) -> tuple[tuple[int | None, int], ...]:
        """For each input the stage whose output it is, and which; (None, 0) for an argument of the model."""
        outputs = [[output.name for output in wires] for wires in self.info.stage_outputs]
        return tuple(
            (None, 0) if wire.source is None else (wire.source, outputs[wire.source].index(wire.name))
            for wire in self.info.stage_inputs[self.stage]
        )
