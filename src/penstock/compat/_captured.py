"""A captured stage as programs drive it: `_PipelineStage` and `build_stage` of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.capture import PipeInfo
from penstock.capture.pipe import CapturedStage
from penstock.capture.stage_module import StageModule
from penstock.compat._exchange import RecvInfo
from penstock.compat._infer import PipelineStage
from penstock.compat._metadata import Metas
from penstock.errors import CaptureError

NAME = "submod_pp_"  # of a stage in torch's captured graphs


class _PipelineStage(CapturedStage, PipelineStage):
    """A stage around a captured module, with everything that programs find on torch's."""

    @property
    def name(self) -> str:
        return f"{NAME}{self.stage_index}"

    def _move_submod_to_device(self) -> None:
        self.submod.to(self.device)

    def get_stage_index_of_submod(self, submod_name: str) -> int:
        """The stage of that name."""
        number = submod_name.removeprefix(NAME)
        if not number.isdigit() or int(number) >= self.num_stages:
            raise CaptureError(f"no stage is called {submod_name!r}; expected {NAME}0 to {NAME}{self.num_stages - 1}")
        return int(number)

    def find_dst_rank(self, user: Any) -> int | None:
        """The stage that a user of a value belongs to; None for what is no stage."""
        name = str(getattr(user, "name", user))
        return self.get_stage_index_of_submod(name) if name.startswith(NAME) else None

    def _get_output_node(self) -> Any:
        graph: Any = self.submod.graph
        return next(node for node in graph.nodes if node.op == "output")

    # -- driven by hand

    @property
    def _received(self) -> tuple[int, ...]:
        """Which outputs of the stage before this one reads."""
        return () if self.is_first else self.routes.wanted_on(self.stage_index - 1, [self.stage_index])

    def _call_of(
        self, received: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        before = {self.stage_index - 1: dict(zip(self._received, received, strict=True))}
        return self.routes.call(before, args, kwargs)

    def _from_before(self, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(outputs[place] for place in self._received)

    def _shape_inference(self, args: tuple[Any, ...] | None, kwargs: dict[str, Any] | None = None) -> Metas:
        arrived = [] if self.is_first else [self._example(meta) for meta in self._stage_meta.inputs or ()]
        called, _ = self._call_of(arrived, args if args is not None else self._model_args, kwargs or {})
        return self._metas_of_call(called, {})

    def _create_act_recv_info(self) -> tuple[RecvInfo, ...]:
        sources = [wire.source for wire in self.pipe_info.stage_inputs[self.stage_index] if wire.source is not None]
        far = [source for source in sources if source != self.stage_index - 1]
        return (*super()._create_act_recv_info(), *(RecvInfo("skip", source) for source in far))

    def _create_act_send_info(self) -> dict[int, list[int | None]]:
        if self.is_last:
            return super()._create_act_send_info()
        wires = self.pipe_info.stage_outputs[self.stage_index]
        return {place: list(wire.stages) for place, wire in enumerate(wires)}


def build_stage(
    stage_module: StageModule, stage_index: int, pipe_info: PipeInfo, device: torch.device | str, group: Any = None
) -> _PipelineStage:
    """A stage for a schedule, around a captured module that is moved to `device`.

    stage = build_stage(pipe.get_stage_module(0), 0, pipe.info(), "cpu")
    """
    return _PipelineStage(stage_module, stage_index, pipe_info, device, group)
