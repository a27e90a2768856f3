"""What a stage keeps for programs that drive it, and what crosses to other stages: buffers, P2P operations, handing over.

    works = _batch_p2p(stage.get_fwd_recv_ops(0))
    ...
    output = stage.forward_one_chunk(0, ())
    works = _batch_p2p(stage.get_fwd_send_ops(0))

A buffer exists from the moment its receive is posted until its tensor is taken out. What is kept has the names that
torch.distributed.pipelining gives it, and is made when it is first asked for. penstock's own steps keep their state in
`penstock.run`, and touch none of this but `output_chunks`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comm.messages import Work
from penstock.comm.transport import Transport
from penstock.compat._siblings import renamed
from penstock.compat._utils import Metas, RecvInfo, _MeshCache, _StageMeta, _TensorMeta, extract_tensor_meta
from penstock.errors import ShapeError, StageError
from penstock.nest import Value
from penstock.parallel import DataParallel, Unwrapped, unwrap
from penstock.run.layout import TensorLayout, dense, unwire, wire
from penstock.stage.deferred import Deferral, Pending
from penstock.stage.dtensors import MeshGetter, mesh_of, to_local
from penstock.stage.pipeline_stage import PipelineStage, RankGroup


class Exchange(PipelineStage):
    """What a stage keeps and passes on; a subclass that calls no constructor finds it too."""

    stage_index = 0
    dw_builder: Callable[[], Callable[..., None]] | None = None
    get_mesh: MeshGetter | None = None

    chunks: int | None = None  # the number of microbatches
    grad_send_info: list[int | None] | None = None  # where the gradient of each input goes
    has_backward = False  # whether gradients are wanted; a schedule with a loss says so
    _runtime_validate = False  # check every tensor against what came before; each rank decides that for itself
    _model_args: tuple[Value, ...] = ()  # the model's arguments, for stages that read some of them
    _hears_all = False  # whether all stages that read an output send a gradient back, or the first of them alone
    _splits = True  # whether the backward of some microbatch may come in two parts
    _in_step = False  # within a step of a schedule, which has scaled the loss and reduces by itself
    _gradients_before: Sequence[tuple[Tensor, int]] = ()  # the step, each with its version
    _undivided: Sequence[Tensor] = ()  # the gradients of the step that a method of the program's own is to divide
    _adapter: DataParallel = Unwrapped()  # the data parallelism of the module, while a step runs

    _has_backward = renamed("has_backward")

    log_prefix = cached_property[str](lambda self: f"[Stage {self.stage_index}]")
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

    # What earlier stages have said of their outputs.
    _heard = cached_property[Mapping[int, Metas | None]](lambda _: {})
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

    # Which rank holds which stage; the schedule knows better.
    stage_index_to_group_rank = cached_property[dict[int, int]](
        lambda self: {stage: stage % self.group_size for stage in range(self.num_stages)}
    )

    def _check_chunk_id(self, chunk_id: int) -> None:
        if self.chunks is None:
            raise StageError("the number of microbatches is not known; expected a schedule's step, or stage.chunks = n")
        if not 0 <= chunk_id < self.chunks:
            raise StageError(f"microbatch {chunk_id} of {self.chunks}; expected 0 to {self.chunks - 1}")

    def _to_tensor(self, arg: Tensor | _TensorMeta | None) -> Tensor:
        """A tensor of zeros that looks like this; a tensor as a leaf of its own."""
        if isinstance(arg, Tensor):
            return arg.detach().requires_grad_(arg.requires_grad)
        if arg is None:
            raise ShapeError(f"stage {self.stage_index} gets something that is no tensor from the stage before")
        zeros = torch.zeros(tuple(arg.shape), dtype=arg.dtype, device=self.device)
        return arg.on_mesh(zeros, self._mesh_cache).detach().requires_grad_(arg.requires_grad)

    def _describe(self) -> bytes:
        """What is known of the outputs of this stage, and of those of earlier ones that later ones read."""
        heard = {**self._heard, self.stage_index: self._stage_meta.outputs}
        rows = {
            k: metas and [meta and TensorLayout.of(self._to_tensor(meta)).to_json() for meta in metas]
            for k, metas in heard.items()
            if self._passes_on(k)
        }
        return json.dumps(rows).encode()

    def _sources(self, number: int) -> Sequence[tuple[int, int]]:
        """Where so many inputs come from, in the order in which they are received: the stage, and which of its outputs."""
        return [(self.stage_index - 1, place) for place in range(number)]

    def _passes_on(self, producer: int) -> bool:
        """Whether the stages after this one must hear what the outputs of `producer` look like."""
        return producer == self.stage_index

    def _told(self, description: bytes) -> Mapping[int, Metas | None]:
        """What the stage before has said of its outputs, and of those of earlier ones."""
        return {
            int(k): None if rows is None else tuple(row and self._read_row(row) for row in rows)
            for k, rows in json.loads(description).items()
        }

    def _read_row(self, row: list[Value]) -> _TensorMeta:
        layout = TensorLayout.from_json(row)
        mesh = None if layout.distributed is None else mesh_of(self.submod, self.get_mesh, layout.distributed)
        found = unwire(layout.empty(self.device), layout, mesh).requires_grad_(layout.requires_grad)
        self._mesh_cache.update_from_tensors([found])
        return extract_tensor_meta(found)

    def clear_runtime_states(self) -> None:
        """Forget the last step."""
        for cache in (self.fwd_cache, self.bwd_cache, self.dw_runner, self._pending, self._posted, self.output_chunks):
            cache.clear()
        self._deferral.reset() if "_deferral" in self.__dict__ else None
        for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
            for info in infos or ():
                info.buffer = None

    # -- operations

    def _op(self, tensor: Tensor, stage: int, *, sends: bool) -> P2P:
        peer = self.stage_index_to_group_rank[stage]
        if isinstance(self.group, Transport):
            return TransportOp(self.group, tensor, peer, sends=sends)
        assert not isinstance(self.group, RankGroup), "what has ranks of its own is a transport"
        return dist.P2POp(dist.isend if sends else dist.irecv, tensor, group=self.group, group_peer=peer)

    def _resolve_peer_global_rank(self, stage_idx: int) -> int:
        group = self.group if self.group is not None else dist.group.WORLD
        assert isinstance(group, dist.ProcessGroup), "only processes have global ranks"
        return dist.get_global_rank(group, self.stage_index_to_group_rank[stage_idx])

    def _get_recv_ops(self, recv_infos: Iterable[RecvInfo]) -> list[P2P]:
        ops: list[P2P] = []
        for info in self._with_buffers(recv_infos):
            if info.is_root_arg or info.buffer is None:
                continue
            if info.source is None:
                raise StageError(f"{info!r} has no source to receive from")
            ops.append(self._op(info.buffer, info.source, sends=False))
        return ops

    def _with_buffers(self, recv_infos: Iterable[RecvInfo]) -> list[RecvInfo]:
        """Let there be something that each arrives in. A method of the program's own may expect it to be there."""
        infos = list(recv_infos)
        for info in infos:
            meta = info.tensor_meta
            if not info.is_root_arg and meta is not None and info.buffer is None:  # contiguous, as it is sent
                info.buffer = torch.empty(tuple(meta.shape), dtype=meta.dtype, device=self.device)
        return infos

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2P]:
        """Receive the inputs of a microbatch."""
        self._posted.add(("RECV_F", fwd_chunk_id))
        return self._get_recv_ops(self.args_recv_info[fwd_chunk_id])

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2P]:
        """Receive the gradients of the outputs of a microbatch."""
        if not self.has_backward or self.is_last:
            return []
        self._posted.add(("RECV_B", bwd_chunk_id))
        return self._get_recv_ops(self.grad_recv_info[bwd_chunk_id])

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[P2P]:
        """Send the outputs of a microbatch to the stages that read them."""
        outputs, _ = self.fwd_cache[fwd_chunk_id]
        ops: list[P2P] = []
        for place, output in enumerate(outputs):
            for stage in self.act_send_info[place]:
                if stage is not None:
                    self._check_sent(place, output)
                    ops.append(self._op(wire(output.detach()), stage, sends=True))
        self._posted.add(("SEND_F", fwd_chunk_id))
        return ops

    def _check_sent(self, place: int, output: Value) -> None:
        """What is sent must fit the buffer at the other end."""
        if not isinstance(output, Tensor):
            kind = type(output).__name__
            raise ShapeError(f"output {place} of stage {self.stage_index} is a {kind}; expected a tensor")
        metas = self._stage_meta.outputs
        meta = metas[place] if metas is not None and place < len(metas) else None
        found = () if meta is None else meta.get_diff(output)
        if diffs := [diff for diff in found if diff.startswith(("shape", "dtype"))]:
            text = f"output {place} of stage {self.stage_index}: {'; '.join(diffs)}"
            raise ShapeError(f"{text}; the next stage expects what it got in the first step")

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[P2P]:
        """Send the gradients of the inputs of a microbatch back; a gradient that is missing goes as zeros."""
        if not self.has_backward or self.is_first:
            return []
        self._check_chunk_id(bwd_chunk_id)
        if self.grad_send_info is None:
            self.grad_send_info = self._create_grad_send_info(self.args_recv_info[0])
        ops: list[P2P] = []
        for place, (grad, stage) in enumerate(zip(self.bwd_cache.pop(bwd_chunk_id), self.grad_send_info, strict=True)):
            meta = None if stage is None else self._get_grad_send_meta(place)
            if stage is not None and meta is not None:
                zeros = torch.zeros(tuple(meta.shape), dtype=meta.dtype, device=self.device) if grad is None else grad
                ops.append(self._op(wire(dense(zeros.detach())), stage, sends=True))
            elif grad is not None:
                why = "no stage is to have it; expected none"
                if stage is not None:
                    why = (
                        "the stage before has no buffer for it. DTensor grad metadata cannot be derived from the activation, "
                        "whose gradient may be spread otherwise; write PipelineStage(..., input_grads=...)"
                    )
                where = f"stage {self.stage_index}, microbatch {bwd_chunk_id}"
                raise ShapeError(f"{where}: the gradient of input {place} is there, and {why}")
        self._posted.add(("SEND_B", bwd_chunk_id))
        return ops

    def _get_grad_send_meta(self, input_idx: int) -> _TensorMeta | None:
        metas = self._stage_meta.input_grads or self._stage_meta.with_gradients().input_grads or ()
        if input_idx >= len(metas):
            text = f"stage {self.stage_index}: nothing is known of input {input_idx}, whose gradient is to be sent"
            raise ShapeError(text)
        return metas[input_idx]

    # -- who sends what to whom

    def _create_grad_send_info(self, args_recv_info: Iterable[RecvInfo]) -> list[int | None]:
        """The stage that each input's gradient goes to."""
        return [None if info.is_root_arg else info.source for info in args_recv_info]

    def _create_grad_recv_info(self, act_send_info: dict[int, list[int | None]]) -> tuple[RecvInfo, ...]:
        """The gradients of the outputs, from the first stage that reads each, or from all of them."""
        metas = self._stage_meta.with_gradients().output_grads or ()
        name, many = f"recv_grad_for_{self.stage_index}_from", None if self._hears_all else 1
        return tuple(
            RecvInfo(f"{name}_{reader}", reader, None, metas[place])
            for place, readers in (() if self.is_last else act_send_info.items())
            for reader in [reader for reader in readers if reader is not None][:many]
        )

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        """Say for each microbatch where the gradients of its outputs come from."""
        self.chunks = num_microbatches
        for microbatch in range(num_microbatches):
            self.grad_recv_info[microbatch] = self._create_grad_recv_info(self.act_send_info)
        self.grad_send_info = None

    # -- two neighbouring stages on one rank hand over

    def set_local_fwd_input(self, prev_stage_outputs: Value, mb_index: int) -> None:
        """Take over the outputs of the stage before, which sits on this rank."""
        outputs, before = as_tuple(prev_stage_outputs), self.stage_index - 1
        mine = [outputs[place] for source, place in self._sources(len(outputs)) if source == before]
        self._take_over(self.args_recv_info[mb_index], mine, "before")

    def _take_over(self, infos: Iterable[RecvInfo], values: Iterable[Value], whence: str) -> None:
        for info, value in zip(infos, values, strict=True):
            if not isinstance(value, Tensor) and (value is not None or whence == "before"):
                raise AssertionError(f"the stage {whence} gave a {type(value).__name__}; expected tensor values")
            info.buffer = None if value is None else to_local(value.detach())

    def get_local_bwd_output(self, mb_index: int) -> tuple[Value, ...]:
        """Give away the gradients of this stage's inputs to the stage before, which sits on this rank."""
        if not self.has_backward or self.is_first:
            why = "is the first" if self.is_first else "has no backward"
            raise AssertionError(f"stage {self.stage_index} {why}: its inputs have no gradients to hand over")
        self._check_chunk_id(mb_index)
        return self.bwd_cache.pop(mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Value, ...], mb_index: int) -> None:
        """Take over the gradients of this stage's outputs from the stage after, which sits on this rank."""
        if not isinstance(next_stage_bwd_outputs, tuple):
            raise AssertionError(f"gradients come as a tuple, got {type(next_stage_bwd_outputs).__name__}")
        if not self.has_backward or self.is_last:
            why = "is the last" if self.is_last else "has no backward"
            raise AssertionError(f"stage {self.stage_index} {why}: it takes no gradients from another stage")
        self._take_over(self.grad_recv_info[mb_index], next_stage_bwd_outputs, "after")

    # -- taking out what has arrived

    def _map_tensor_from_recv_info(self, recv_infos: Iterable[RecvInfo]) -> tuple[Tensor | None, ...]:
        return tuple(info.buffer for info in recv_infos)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        """The inputs of a microbatch, as fresh leaves."""
        return tuple(self._leaf(info) for info in self.args_recv_info[fwd_chunk_id])

    def _leaf(self, info: RecvInfo) -> Tensor:
        tensor, meta = info.take(self._mesh_cache).detach(), info.tensor_meta
        wanted = self.has_backward and torch.is_grad_enabled() and (meta is None or meta.requires_grad)
        return tensor.requires_grad_(wanted and (tensor.is_floating_point() or tensor.is_complex()))

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        """The gradients of the outputs of a microbatch; None where there is none."""
        infos = self.grad_recv_info[bwd_chunk_id]
        return tuple(None if info.buffer is None else info.take(self._mesh_cache) for info in infos)

    def _get_init_p2p_neighbors_ops(self) -> list[P2P]:
        """A first, tiny exchange with the stages before and after, so that connections exist."""
        beside = (self.stage_index - 1, self.stage_index + 1)
        far = [k for k in beside if self.stage_index_to_group_rank.get(k, self.group_rank) != self.group_rank]
        return [self._op(torch.zeros(1, device=self.device), k, sends=way) for k in far for way in (False, True)]


def as_tuple(output: Value) -> tuple[Value, ...]:
    """The outputs of a stage: a tuple or list is several, anything else one."""
    return tuple(output) if type(output) in (list, tuple) else (output,)


normalize_model_output_as_tuple = as_tuple


class TransportOp:
    """A send or receive between ranks that are threads; a process group's are `torch.distributed.P2POp`."""

    def __init__(self, transport: Transport, tensor: Tensor, peer: int, *, sends: bool) -> None:
        self.transport, self.tensor, self.peer, self.sends = transport, tensor, peer, sends

    def post(self) -> Work:
        return (self.transport.isend if self.sends else self.transport.irecv)(self.tensor, self.peer)


P2P: TypeAlias = "dist.P2POp | TransportOp"
"""A send or receive that is not posted yet."""


def batch_p2p(p2p_ops: Sequence[P2P], desc: str | None = None) -> list[Any]:
    """Post operations. Sends only, or receives only, go one by one; a mixture goes as one batch, so that it cannot hang."""
    ops = [op for op in p2p_ops if not isinstance(op, TransportOp)]
    if not ops:
        return [op.post() for op in p2p_ops if isinstance(op, TransportOp)]
    kinds = {op.op for op in ops}
    if kinds == {dist.isend}:
        return [dist.isend(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer) for op in ops]
    if kinds == {dist.irecv}:
        return [dist.irecv(op.tensor, group=op.group, tag=op.tag, group_src=op.group_peer) for op in ops]
    return dist.batch_isend_irecv(ops)


def sorted_batch_p2p(p2p_ops: Iterable[P2P], desc: str | None = None) -> dict[int, list[Any]]:
    """Post operations rank by rank of the other end, in the order of ranks; their works by that rank."""
    ops = sorted(p2p_ops, key=lambda op: op.peer)
    return {peer: batch_p2p(list(same), desc) for peer, same in groupby(ops, key=lambda op: op.peer)}


def wait_batch_p2p(work: Iterable[Work]) -> None:
    """Wait for posted operations."""
    for one in work:
        one.wait()
