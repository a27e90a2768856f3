"""`torch.distributed.pipelining._utils`: what is known of the tensors of a stage before they exist, and small helpers.

>>> expected = _TensorMeta.from_tensor(torch.zeros(2, 3))
>>> expected.get_diff(_TensorMeta.from_tensor(torch.zeros(2, 4)))
['shape mismatch: expected [2, 3], got [2, 4]', 'stride mismatch: expected [3, 1], got [4, 1]']

Programs make receive buffers of it, and check what arrives; penstock's own steps describe their messages in band
(`penstock.run.layout`) and need none of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.compat._siblings import found_in
from penstock.errors import PlanError, ShapeError
from penstock.nest import Value
from penstock.plan import Placement
from penstock.stage.dtensors import MeshGetter, layout_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

PipeliningMetadataError = PipeliningShapeError = ShapeError
__getattr__ = found_in(__name__, "._IR", "..capture")


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether this is a DTensor; costs no import where there are none."""
    return isinstance(tensor, Tensor) and layout_of(tensor) is not None


def is_strided(value: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor whose sizes and strides tell what it looks like; sparse and nested ones have none."""
    return isinstance(value, Tensor) and value.layout is torch.strided


MeshCacheKey = tuple[tuple[str, ...], object]  # the names of the dimensions of a mesh, and its layout


@dataclass(frozen=True, slots=True)
class _TensorMeta:
    """A tensor without its numbers; of a DTensor, its local part."""

    shape: torch.Size
    stride: tuple[int, ...]  # of the tensor itself: what is sent is contiguous
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def from_tensor(tensor: Tensor) -> _TensorMeta:
        if is_dtensor(tensor):
            raise ShapeError("this is a DTensor, and a plain tensor was expected; use from_dtensor")
        return _TensorMeta(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)

    def to_tensor(self, device: torch.device | str) -> Tensor:
        """A tensor with undefined numbers."""
        return _make_tensor_from_meta(self, device).requires_grad_(self.requires_grad and self.differentiable)

    def on_mesh(self, local: Tensor, meshes: _MeshCache) -> Tensor:
        """What has arrived: of a DTensor that of which this is the local part."""
        return local

    @property
    def differentiable(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex

    def get_diff(self, other: _TensorMeta | Tensor) -> list[str]:
        """What differs, in words. Whether a gradient is wanted depends on the step, and does not count."""
        if isinstance(other, Tensor):
            other = extract_tensor_meta(other)
        if type(self) is not type(other):
            mine, theirs = ("a DTensor" if isinstance(one, _DTensorMeta) else "a plain tensor" for one in (self, other))
            return [f"type mismatch: expected {mine}, got {theirs}"]
        names = [field.name for field in fields(self) if field.name != "requires_grad"]
        pairs = [(name, *(_plain(getattr(meta, name)) for meta in (self, other))) for name in names]
        return [f"{name} mismatch: expected {this}, got {that}" for name, this, that in pairs if this != that]


@dataclass(frozen=True, slots=True)
class _DTensorMeta(_TensorMeta):
    """A DTensor without its numbers: its local part, and how it is spread over a mesh."""

    global_shape: torch.Size = torch.Size()  # noqa: RUF009  a tuple
    global_stride: tuple[int, ...] = ()
    placements: tuple[Any, ...] = ()
    mesh_dim_names: tuple[str, ...] = ()
    mesh_layout: object = None

    @staticmethod
    def from_dtensor(dtensor: DTensor) -> _DTensorMeta:
        if not is_dtensor(dtensor):
            raise ShapeError(f"a DTensor was expected, this is a {type(dtensor).__name__}; use from_tensor")
        local, mesh = dtensor._local_tensor, dtensor.device_mesh
        here = local.shape, local.stride(), dtensor.dtype, dtensor.requires_grad
        spread = dtensor.shape, dtensor.stride(), tuple(dtensor.placements)
        return _DTensorMeta(*here, *spread, tuple(mesh.mesh_dim_names or ()), mesh._layout)

    @property
    def mesh_cache_key(self) -> MeshCacheKey:
        return self.mesh_dim_names, self.mesh_layout

    def on_mesh(self, local: Tensor, meshes: _MeshCache) -> Tensor:
        return self.wrap(local, meshes.get_mesh(self.mesh_cache_key))

    def to_dtensor(self, device: torch.device | str, mesh: DeviceMesh | None) -> DTensor:
        """A DTensor with undefined numbers."""
        made = self.wrap(_make_tensor_from_meta(self, device), mesh)
        made.requires_grad_(self.requires_grad and self.differentiable)
        return made

    def wrap(self, local: Tensor, mesh: DeviceMesh | None) -> DTensor:
        """The DTensor of which this is the local part."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local, mesh, self.placements, run_check=False, shape=self.global_shape, stride=self.global_stride
        )


TensorMeta = _TensorMeta | _DTensorMeta
Metas = tuple[_TensorMeta | None, ...]


@dataclass(slots=True)
class _StageMeta:
    """All that is known of a stage: its inputs and outputs, and their gradients. None: not known yet."""

    inputs: Metas | None = None
    outputs: Metas | None = None
    input_grads: Metas | None = None
    output_grads: Metas | None = None

    def _every(self) -> tuple[Metas | None, ...]:
        return self.inputs, self.outputs, self.input_grads, self.output_grads

    def with_gradients(self) -> _StageMeta:
        """The same with gradients: one looks like its value, unless somebody has said otherwise."""
        pairs = (self.inputs, self.input_grads), (self.outputs, self.output_grads)
        grads = [_derive_grad_metas(values or ()) if known is None else known for values, known in pairs]
        return _StageMeta(self.inputs, self.outputs, *grads)

    def has_any(self) -> bool:
        return any(metas is not None for metas in self._every())

    def has_dtensors(self) -> bool:
        return any(isinstance(meta, _DTensorMeta) for metas in self._every() for meta in metas or ())

    def is_complete_for_forward(self) -> bool:
        return self.inputs is not None and self.outputs is not None


class _StageForwardMeta(NamedTuple):
    """What a stage says of its outputs to the stage after it."""

    forward_metas: Metas


class _StageBackwardMeta(NamedTuple):
    """What a stage says of the gradients of its inputs to the stage before it."""

    backward_metas: Metas


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

    def take(self, meshes: _MeshCache) -> Tensor:
        """The tensor that has arrived; the buffer is given up."""
        if self.buffer is None:
            raise ShapeError(f"{self!r}: nothing has arrived; expected its receive, or a hand-over, before its use")
        buffer, self.buffer = self.buffer, None
        return buffer if self.tensor_meta is None else self.tensor_meta.on_mesh(buffer, meshes)


class RootArgPlaceholder(RecvInfo):
    """An argument of the model, which nobody sends."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__("root", is_root_arg=True)
        self.meta = tensor.to("meta")


InputInfo = RecvInfo | RootArgPlaceholder


class GetMeshCallback(Protocol):
    """The user's function that names the mesh on which an arriving DTensor is put."""

    def __call__(self, dim_names: tuple[str, ...], layout: object, /) -> DeviceMesh | None: ...


class InferenceMode(Enum):
    """Where the metadata of a stage come from: from the user, or from a first look at the model."""

    STATIC = "static"
    DYNAMIC = "dynamic"

    @classmethod
    def needs_dynamic(cls, meta: _StageMeta, stage_has_backward: bool) -> bool:
        """Whether what the user gave is not enough. How a DTensor's gradient is spread cannot be told from itself."""
        if not meta.is_complete_for_forward():
            return True
        if not stage_has_backward or not meta.has_dtensors():
            return False
        return meta.input_grads is None or meta.output_grads is None


class _MeshCache(dict[MeshCacheKey, "DeviceMesh | None"]):
    """The meshes that arriving DTensors are put on, by the names and the layout of the sender's."""

    def __init__(self, get_mesh_cb: MeshGetter | None = None) -> None:
        self._ask = get_mesh_cb

    def __missing__(self, key: MeshCacheKey) -> DeviceMesh | None:
        if self._ask is None:
            raise ShapeError(
                f"a DTensor on a mesh with the dimensions {key[0]} arrived, which this stage does not know; write "
                "PipelineStage(..., get_mesh=lambda names, layout: mesh)"
            )
        self[key] = self._ask(*key)
        return self[key]

    def get_mesh(self, key: MeshCacheKey) -> DeviceMesh | None:
        return self[key]

    def put(self, key: MeshCacheKey, mesh: DeviceMesh | None) -> None:
        self[key] = mesh

    def update_from_tensors(self, tensors: Sequence[object]) -> None:
        for tensor in tensors:
            if is_dtensor(tensor):
                self.put(_DTensorMeta.from_dtensor(tensor).mesh_cache_key, tensor.device_mesh)


def _plain(value: object) -> object:
    """Sizes and their like may come as a tuple or as a list."""
    return list(value) if isinstance(value, (tuple, list)) else value


def _make_tensor_from_meta(meta: _TensorMeta, device: torch.device | str) -> Tensor:
    """A plain tensor with undefined numbers; of a DTensor the local part."""
    return torch.empty_strided(tuple(meta.shape), tuple(meta.stride), dtype=meta.dtype, device=device)


def _derive_grad_metas(tensor_metas: Metas) -> Metas:
    """What the gradients of these tensors look like, as far as that can be told: not for DTensors."""
    return tuple(
        replace(meta, requires_grad=False) if type(meta) is _TensorMeta and meta.requires_grad else None
        for meta in tensor_metas
    )


def extract_tensor_meta(tensor: Tensor) -> _TensorMeta:
    return _DTensorMeta.from_dtensor(tensor) if is_dtensor(tensor) else _TensorMeta.from_tensor(tensor)


def extract_tensor_metas(tensors: Sequence[object] | None, *, allow_none: bool = False) -> Metas | None:
    """What these look like; None in the place of nests, sparse tensors and their like."""
    if tensors is None:
        return None
    if not allow_none and not all(isinstance(tensor, Tensor) for tensor in tensors):
        kinds = [type(tensor).__name__ for tensor in tensors]
        raise ShapeError(f"only tensors have metadata, got {kinds}; where some may be missing, write allow_none=True")
    return tuple(extract_tensor_meta(tensor) if is_strided(tensor) else None for tensor in tensors)


def to_local_if_dtensor(tensor: Tensor, detach: bool = False) -> Tensor:
    """The part of a DTensor that this rank holds; any other tensor as it is."""
    given = tensor.detach() if detach else tensor
    return given.to_local() if is_dtensor(given) else given


def validate_and_normalize_to_tuple(args: Value, allow_none: bool = False) -> tuple[Value, ...] | None:
    """A tensor, or a tuple or list of tensors, as a tuple."""
    if args is None:
        return None
    if isinstance(args, Tensor):
        return (args,)
    if not isinstance(args, (tuple, list)):
        raise ShapeError(f"expected a tensor, or a tuple or list of them, got {type(args).__name__}")
    for place, arg in enumerate(args):
        if not isinstance(arg, Tensor) and not (arg is None and allow_none):
            what = "None" if arg is None else f"a {type(arg).__name__}"
            raise ShapeError(f"argument {place} of the stage is {what}; expected a tensor, pass others as keywords")
    return tuple(args)


def validate_metadata(
    desc: str, expected: _TensorMeta, actual: Value, *, raise_on_mismatch: bool = False, warn_on_mismatch: bool = False
) -> list[str]:
    """Compare a tensor, or what is known of it, with what was expected; the differences in words."""
    diffs = expected.get_diff(actual)
    _judge([f"{desc}: {diff}" for diff in diffs], raises=raise_on_mismatch, warns=warn_on_mismatch)
    return diffs


def _judge(problems: Sequence[str], *, raises: bool, warns: bool) -> None:
    """Say what does not fit in the way that was asked for, if something does not."""
    if problems and raises:
        raise ShapeError("; ".join(problems))
    if problems and warns:
        warnings.warn(f"Metadata mismatch, what was found holds: {'; '.join(problems)}", UserWarning, stacklevel=3)


def validate_tensors_metadata(
    desc: str,
    expected: Sequence[_TensorMeta | None],
    actual: Sequence[Any],
    *,
    raise_on_mismatch: bool = True,
    warn_on_mismatch: bool = False,
) -> list[str]:
    """The same for several tensors, of which some may be missing on both sides."""
    problems: list[str] = []
    if len(expected) != len(actual):
        problems.append(f"{desc}: {len(actual)} tensors; expected {len(expected)}")
    else:
        for place, (meta, tensor) in enumerate(zip(expected, actual, strict=True)):
            if (meta is None) != (tensor is None):
                what = "missing" if tensor is None else "there, where none was expected"
                problems.append(f"{desc}[{place}] is {what}")
            elif meta is not None:
                problems += [f"{desc}[{place}]: {diff}" for diff in meta.get_diff(tensor)]
    _judge(problems, raises=raise_on_mismatch, warns=warn_on_mismatch)
    return problems


def validate_static_arg_grad_correspondence(
    stage_index: int, args: Sequence[Tensor], grads: Sequence[Tensor | None], is_input: bool
) -> None:
    """What the user gave as arguments and as their gradients must fit together."""
    kind = "input" if is_input else "output"
    if len(args) != len(grads):
        raise ShapeError(f"stage {stage_index}: {len(args)} {kind}_args, {len(grads)} {kind}_grads; expected as many")
    for place, (arg, grad) in enumerate(zip(args, grads, strict=True)):
        name = f"stage {stage_index}: {kind}_args[{place}]"
        if grad is None:
            if arg.requires_grad:
                text = f"{name} requires a gradient, and {kind}_grads[{place}] is None"
                warnings.warn(text, UserWarning, stacklevel=2)
        elif not arg.requires_grad:
            raise ShapeError(f"{name} requires no gradient, and {kind}_grads[{place}] is one; expected None there")
        elif is_dtensor(arg) and not is_dtensor(grad):
            raise ShapeError(f"{name} is a DTensor, and {kind}_grads[{place}] is none; expected a DTensor or None")


def flatten_args(args: Value, *, detach: bool = False) -> Value:
    """The leaves of nested arguments; with `detach`, the arguments again with fresh leaves, and these leaves."""
    if not detach:
        return pytree.tree_leaves(args)
    fresh = pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), args)
    return fresh, pytree.tree_leaves(fresh)


def flatten_args_detach(args: Value) -> Value:
    return flatten_args(args, detach=True)


def generate_stage_to_rank_mapping(pp_size: int, num_stages: int, style: str = "loop") -> dict[int, int]:
    """Which rank holds which stage.

    >>> generate_stage_to_rank_mapping(2, 4, style="v")
    {0: 0, 1: 1, 2: 1, 3: 0}
    """
    if style == "loop":
        return {stage: stage % pp_size for stage in range(num_stages)}
    if style != "v":
        raise PlanError(f"style={style!r}; expected 'loop' or 'v'")
    per_rank, rest = divmod(num_stages, pp_size)
    if rest:
        raise PlanError(f"{num_stages} stages in a V over {pp_size} ranks; expected the same number on every rank")
    return dict(enumerate(Placement.v(pp_size, per_rank).ranks))


def generate_rank_to_stage_mapping(pp_size: int, num_stages: int, style: str = "loop") -> dict[int, list[int]]:
    """Which stages each rank holds, in order."""
    homes = generate_stage_to_rank_mapping(pp_size, num_stages, style)
    return {rank: [stage for stage, home in homes.items() if home == rank] for rank in dict.fromkeys(homes.values())}
