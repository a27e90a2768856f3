"""Where a captured stage gets its inputs: from which stage's outputs, and which of the model's arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.capture.info import PipeInfo


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
    def has_loss(self) -> bool:
        """Whether the model returns its own loss."""
        return self.info.has_loss

    def loss_of(self, output: Any) -> Any:
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
        self, values: Mapping[int, Mapping[int, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs of the stage, in its order."""
        arguments = self.info.arguments(self.stage, args, kwargs)
        return tuple(
            arguments[place] if source is None else values[source][place]  # type: ignore[index]
            for source, place in self._sources
        ), {}

    @cached_property
    def _sources(self) -> tuple[tuple[int | None, int | str], ...]:
        """For each input: an output of a stage by its place, or an argument of the model by its name."""
        found: list[tuple[int | None, int | str]] = []
        for wire in self.info.stage_inputs[self.stage]:
            if wire.source is None:
                found.append((None, wire.name))
            else:
                names = [output.name for output in self.info.stage_outputs[wire.source]]
                found.append((wire.source, names.index(wire.name)))
        return tuple(found)
