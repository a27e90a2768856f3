"""What a stage keeps for programs that drive it: in the words of torch.distributed.pipelining, made when first asked for.

penstock's own steps keep their state in `penstock.run`, and touch none of this but `output_chunks`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor

from penstock.compat._metadata import Metas, _DTensorMeta, _MeshCache, _StageMeta, _TensorMeta
from penstock.errors import ShapeError, StageError
from penstock.nest import Value
from penstock.parallel import DataParallel, unwrap
from penstock.run.layout import TensorLayout
from penstock.stage.deferred import Deferral, Pending
from penstock.stage.dtensors import MeshGetter, from_local, mesh_of
from penstock.stage.pipeline_stage import PipelineStage


def renamed(name: str) -> object:
    """An attribute of penstock's under torch's name; a program may set it."""
    return property(lambda self: getattr(self, name), lambda self, value: setattr(self, name, value))


@dataclass(eq=False, repr=False)
class RecvInfo:
    """One input of a stage: from which stage it comes, what it looks like, and the buffer that it arrives in."""

    input_name: str
    source: int | None = None
    buffer: Tensor | None = None
    tensor_meta: _TensorMeta | None = None
    is_root_arg: bool = field(default=False, kw_only=True)  # an argument of the model, given by the user

    def __repr__(self) -> str:
        whence = "the model's argument" if self.is_root_arg else f"from stage {self.source}"
        shape = "" if self.tensor_meta is None else f", {list(self.tensor_meta.shape)}"
        return f"RecvInfo({self.input_name}, {whence}{shape})"

    def take(self) -> Tensor:
        """The tensor that has arrived; the buffer is given up."""
        if self.buffer is None:
            raise ShapeError(f"{self!r}: nothing has arrived; expected its receive, or a hand-over, before its use")
        buffer, self.buffer = self.buffer, None
        return buffer


class RootArgPlaceholder(RecvInfo):
    """An argument of the model, which nobody sends."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__("root", is_root_arg=True)
        self.meta = tensor.to("meta")


class StageState(PipelineStage):
    """The attributes; a subclass that calls no constructor finds them too."""

    stage_index = 0
    dw_builder: Callable[[], Callable[..., None]] | None = None
    get_mesh: MeshGetter | None = None

    chunks: int | None = None  # the number of microbatches
    grad_send_info: list[int | None] | None = None  # where the gradient of each input goes
    has_backward = False  # whether gradients are wanted; a schedule with a loss says so
    _runtime_validate = False  # check every tensor against what came before; each rank decides that for itself
    _model_args: tuple[Value, ...] = ()  # the model's arguments, for stages that read some of them
    _heard: Mapping[int, Metas | None] = MappingProxyType({})  # what earlier stages have said of their outputs
    _splits = True  # whether the backward of some microbatch may come in two parts
    _in_step = False  # within a step of a schedule, which has scaled the loss and reduces by itself
    _gradients_before: Sequence[tuple[Tensor, int]] = ()  # the step, each with its version
    _undivided: Sequence[Tensor] = ()  # the gradients of the step that a method of the program's own is to divide
    _adapter: DataParallel | None = None  # the data parallelism of the module, while a step runs

    _has_backward = renamed("has_backward")

    @property
    def log_prefix(self) -> str:
        return f"[Stage {self.stage_index}]"

    # By microbatch: the outputs of its forward, and its flat inputs; until its backward.
    fwd_cache = cached_property[dict[int, tuple[tuple[Value, ...], list[Value]]]](lambda _: {})
    # By microbatch: the gradients of its inputs, until they are sent or handed over.
    bwd_cache = cached_property[dict[int, tuple[Tensor | None, ...]]](lambda _: {})
    # On the last stage: what each microbatch of the last step gave, if it was asked for.
    output_chunks = cached_property[list[Value]](lambda _: [])
    # By microbatch: the weight work that is still owed.
    dw_runner = cached_property[dict[int, Callable[..., object]]](lambda _: {})
    # Likewise in torch's; here `dw_runner` has all that such work needs.
    backward_state = cached_property[dict[int, tuple[object, ...]]](lambda _: {})
    args_recv_info = cached_property[dict[int, tuple[RecvInfo, ...]]](lambda _: {})
    act_send_info = cached_property[dict[int, list[int | None]]](lambda _: {})
    grad_recv_info = cached_property[dict[int, tuple[RecvInfo, ...]]](lambda _: {})

    # What is known of the tensors of this stage. Programs reset its fields to None when shapes change.
    _stage_meta = cached_property[_StageMeta](lambda _: _StageMeta())
    # What the user gave when the stage was made; likewise.
    _user_meta = cached_property[_StageMeta](lambda _: _StageMeta())
    _mesh_cache = cached_property[_MeshCache](lambda self: _MeshCache(self.get_mesh))
    _deferral = cached_property[Deferral](lambda self: Deferral(unwrap(self.submod)))
    # By microbatch: the weight work that its forward began.
    _pending = cached_property[dict[int, Pending]](lambda _: {})
    # What inputs and outputs of a microbatch looked like when they were first looked at, in penstock's own steps.
    _seen = cached_property[dict[tuple[str, int], Metas]](lambda _: {})
    # The messages of this step that were asked for: their kind, and the microbatch.
    _posted = cached_property[set[tuple[str, int]]](lambda _: set())

    @cached_property
    def stage_index_to_group_rank(self) -> dict[int, int]:
        """Which rank holds which stage; the schedule knows better."""
        return {stage: stage % self.group_size for stage in range(self.num_stages)}

    def _check_chunk_id(self, chunk_id: int) -> None:
        if self.chunks is None:
            raise StageError(
                "the number of microbatches is not known yet; expected a schedule's step, or stage.chunks = n"
            )
        if not 0 <= chunk_id < self.chunks:
            raise StageError(f"microbatch {chunk_id} of {self.chunks}; expected 0 to {self.chunks - 1}")

    def _to_tensor(self, arg: Tensor | _TensorMeta | None) -> Tensor:
        """A tensor of zeros that looks like this; a tensor as a leaf of its own."""
        if isinstance(arg, Tensor):
            return arg.detach().requires_grad_(arg.requires_grad)
        if arg is None:
            raise ShapeError(f"stage {self.stage_index} gets something that is no tensor from the stage before")
        if isinstance(arg, _DTensorMeta):
            return arg.to_dtensor(self.device, self._mesh_cache.get_mesh(arg.mesh_cache_key)).detach().zero_()
        example = torch.zeros(tuple(arg.shape), dtype=arg.dtype, device=self.device)
        return example.requires_grad_(arg.requires_grad)

    def _describe(self) -> bytes:
        """What is known of the outputs of this stage, and of those of earlier ones that later ones read."""
        heard = {**self._heard, self.stage_index: self._stage_meta.outputs}
        rows = {
            k: metas and [meta and TensorLayout.of(self._to_tensor(meta)).to_json() for meta in metas]
            for k, metas in heard.items()
            if self._passes_on(k)
        }
        return json.dumps(rows).encode()

    def _passes_on(self, producer: int) -> bool:
        """Whether the stages after this one must hear what the outputs of `producer` look like."""
        return producer == self.stage_index

    def _hear(self, description: bytes) -> None:
        """Note what the stage before has said."""
        self._heard = {
            int(k): None if rows is None else tuple(row and self._read_row(row) for row in rows)
            for k, rows in json.loads(description).items()
        }

    def _read_row(self, row: list[Value]) -> _TensorMeta:
        layout = TensorLayout.from_json(row)
        tensor = layout.empty(self.device)
        if layout.distributed is None:
            return _TensorMeta.from_tensor(tensor.requires_grad_(layout.requires_grad))
        mesh = mesh_of(self.submod, self.get_mesh, layout.distributed)
        found = from_local(tensor, layout.distributed, mesh).requires_grad_(layout.requires_grad)
        meta = _DTensorMeta.from_dtensor(found)  # type: ignore[arg-type]
        self._mesh_cache.put(meta.mesh_cache_key, mesh)
        return meta

    def clear_runtime_states(self) -> None:
        """Forget the last step."""
        for cache in (self.fwd_cache, self.bwd_cache, self.dw_runner, self._pending, self._posted):
            cache.clear()
        self.output_chunks.clear()
        self._deferral.reset() if "_deferral" in self.__dict__ else None
        for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
            for info in infos or ():
                info.buffer = None


def is_overridden(thing: object, *names: str) -> bool:
    """Whether a program has put something of its own in the place of a method: in a subclass, on the object itself, or on one
    of the classes here. Where a function was written tells, which decorators that copy its name and module do not change.
    """
    kind, own = type(thing), vars(thing)
    return any(name in own or not _written_here(getattr(kind, name)) for name in names)


def _written_here(function: object) -> bool:
    return getattr(function, "__globals__", {}).get("__name__", "").startswith("penstock.compat.")  # type: ignore[no-any-return]
