"""A handler for each kind of action: asked once, before the first step, it returns the call that does the action.

    HANDLERS[Op.F](program, action)      # -> the call that runs the forward of that stage and microbatch

A new op gets its handler here. `Schedule.register_custom_function` puts a function of the user's before it.
"""

from __future__ import annotations

from functools import partial

from penstock.plan import Action, Op, Overlap
from penstock.run.program import Program
from penstock.run.setting import Call, Handler, Handlers


def _of_run(method: str) -> Handler:
    """The handler that calls a method of the stage's run."""
    return lambda program, action: partial(getattr(program.runs[action.stage], method), _microbatch(action))


def _of_box(method: str) -> Handler:
    """The handler that calls a method of the box that a message leaves, or comes to."""
    return lambda program, action: partial(getattr(program.message_box(action), method), _microbatch(action))


def _care(method: str, wanted: str) -> Handler:
    """The handler that calls a method of the stage's data parallelism, if that has something to do."""

    def handler(program: Program, action: Action) -> Call:
        adapter = program.setting.adapters[action.stage]
        call: Call = getattr(adapter, method)
        return call if getattr(adapter, wanted) else nothing

    return handler


def _overlap(program: Program, pair: Overlap) -> Call:
    """One after the other; a function of the user's may weave them."""
    return partial(_in_series, program.bind(pair.first), program.bind(pair.second))


HANDLERS: Handlers = {
    Op.F: _of_run("forward"),
    Op.B: _of_run("backward"),
    Op.I: _of_run("backward_input"),
    Op.W: _of_run("backward_weight"),
    Op.SEND_F: _of_box("send"),
    Op.RECV_F: _of_box("post"),
    Op.SEND_B: _of_box("send"),
    Op.RECV_B: _of_box("post"),
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
