"""A handler for each kind of action: asked once, before the first step, it returns the call that does the action.

    HANDLERS[Op.F](program, action, cold)      # -> the call that runs the forward of that stage and microbatch

A new op gets its handler here. `Schedule.register_custom_function` puts a function of the user's before it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.plan import Action, Op, Overlap
from penstock.run.program import Call, Handlers, Program


def _forward(program: Program, action: Action, cold: bool) -> Call:
    run = program.runs[action.stage]
    checked = cold and run.stage.input_args is not None
    return partial(run.checked_forward if checked else run.forward, _microbatch(action))


def _backward(program: Program, action: Action, cold: bool) -> Call:
    return partial(program.runs[action.stage].backward, _microbatch(action))


def _backward_input(program: Program, action: Action, cold: bool) -> Call:
    return partial(program.runs[action.stage].backward_input, _microbatch(action))


def _backward_weight(program: Program, action: Action, cold: bool) -> Call:
    return partial(program.runs[action.stage].backward_weight, _microbatch(action))


def _recompute(program: Program, action: Action, cold: bool) -> Call:
    return partial(program.runs[action.stage].recompute, _microbatch(action))


def _offload(program: Program, action: Action, cold: bool) -> Call:
    return partial(program.runs[action.stage].offload, _microbatch(action))


def _load(program: Program, action: Action, cold: bool) -> Call:
    return partial(program.runs[action.stage].load, _microbatch(action))


def _send_forward(program: Program, action: Action, cold: bool) -> Call:
    box: Any = program.message_box(action)
    return partial(box.send_described if cold else box.send, action.microbatch)


def _receive_forward(program: Program, action: Action, cold: bool) -> Call:
    box: Any = program.message_box(action)
    return partial(box.queue if cold else box.post, action.microbatch)


def _send_backward(program: Program, action: Action, cold: bool) -> Call:
    box: Any = program.message_box(action)
    return partial(box.send_described_grads if cold else box.send_grads, action.microbatch)


def _receive_backward(program: Program, action: Action, cold: bool) -> Call:
    box: Any = program.message_box(action)
    return partial(box.queue_grads if cold else box.post_grads, action.microbatch)


def _unshard(program: Program, action: Action, cold: bool) -> Call:
    adapter = program.setting.adapters[action.stage]
    return adapter.unshard if adapter.sharded else _nothing


def _reshard(program: Program, action: Action, cold: bool) -> Call:
    adapter = program.setting.adapters[action.stage]
    return adapter.reshard if adapter.sharded else _nothing


def _reduce_grad(program: Program, action: Action, cold: bool) -> Call:
    adapter = program.setting.adapters[action.stage]
    return adapter.reduce_grad if adapter.reduces else _nothing


def _overlap(program: Program, pair: Overlap, cold: bool) -> Call:
    """One after the other; a function of the user's may weave them."""
    return partial(_in_series, *(program.bind(part, cold=cold) for part in (pair.first, pair.second)))


HANDLERS: Handlers = {
    Op.F: _forward,
    Op.B: _backward,
    Op.I: _backward_input,
    Op.W: _backward_weight,
    Op.SEND_F: _send_forward,
    Op.RECV_F: _receive_forward,
    Op.SEND_B: _send_backward,
    Op.RECV_B: _receive_backward,
    Op.UNSHARD: _unshard,
    Op.RESHARD: _reshard,
    Op.REDUCE_GRAD: _reduce_grad,
    Op.R: _recompute,
    Op.O: _offload,
    Op.L: _load,
    Overlap: _overlap,
}


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None, f"{action} belongs to no microbatch"
    return action.microbatch


def _in_series(first: Call, second: Call) -> None:
    first()
    second()


def _nothing() -> None:
    """The call of an action that has nothing to do here."""
