"""A handler for each kind of action: asked once, before the first step, it returns the call that does the action.

    HANDLERS[Op.F](program, action, cold)      # -> the call that runs the forward of that stage and microbatch

A new op gets its handler here. `Schedule.register_custom_function` puts a function of the user's before it.
"""

from __future__ import annotations

from functools import partial

from penstock.plan import Action, Op, Overlap
from penstock.run.program import Box, Program
from penstock.run.setting import Call, Handler, Handlers


def _forward(program: Program, action: Action, cold: bool) -> Call:
    run = program.runs[action.stage]
    checked = cold and run.stage.input_args is not None
    return partial(run.checked_forward if checked else run.forward, _microbatch(action))


def _of_run(method: str) -> Handler:
    """The handler that calls a method of the stage's run."""
    return lambda program, action, cold: partial(getattr(program.runs[action.stage], method), _microbatch(action))


def _send(program: Program, action: Action, cold: bool) -> Call:
    box = program.message_box(action)
    return partial(box.send_described if cold else box.send, _microbatch(action))


def _receive(program: Program, action: Action, cold: bool) -> Call:
    box = program.message_box(action)
    return partial(box.queue if cold else box.post, _microbatch(action))


def receive_in_turn(program: Program, action: Action, cold: bool) -> Call:
    """For messages that share a queue: the receive of a cold step is done in its place, and not when somebody needs it."""
    box = program.message_box(action)
    return partial(_queue_and_pull, box, _microbatch(action)) if cold else _receive(program, action, cold)


def _queue_and_pull(box: Box, microbatch: int) -> None:
    box.queue(microbatch)
    channel = box.channel
    if channel is not None:
        channel.pull_until(lambda: not channel.incoming)


def _care(method: str, wanted: str) -> Handler:
    """The handler that calls a method of the stage's data parallelism, if that has something to do."""

    def handler(program: Program, action: Action, cold: bool) -> Call:
        adapter = program.setting.adapters[action.stage]
        call: Call = getattr(adapter, method)
        return call if getattr(adapter, wanted) else nothing

    return handler


def _overlap(program: Program, pair: Overlap, cold: bool) -> Call:
    """One after the other; a function of the user's may weave them."""
    return partial(_in_series, *(program.bind(part, cold=cold) for part in (pair.first, pair.second)))


HANDLERS: Handlers = {
    Op.F: _forward,
    Op.B: _of_run("backward"),
    Op.I: _of_run("backward_input"),
    Op.W: _of_run("backward_weight"),
    Op.SEND_F: _send,
    Op.RECV_F: _receive,
    Op.SEND_B: _send,
    Op.RECV_B: _receive,
    Op.UNSHARD: _care("unshard", "sharded"),
    Op.RESHARD: _care("reshard", "sharded"),
    Op.REDUCE_GRAD: _care("reduce_grad", "reduces"),
    Op.R: _of_run("recompute"),
    Op.O: _of_run("offload"),
    Op.L: _of_run("load"),
    Overlap: _overlap,
}


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None, f"{action} belongs to no microbatch"
    return action.microbatch


def _in_series(first: Call, second: Call) -> None:
    first()
    second()


def nothing() -> None:
    """The call of an action that has nothing to do here."""
