"""Which stage computes which node.

A node belongs to the stage in whose part of the model's code it stands, with three exceptions:

- a value that depends on nothing but arguments, buffers and constants is computed where it is first used, unless its own
  stage would have nothing to do then;
- such a value that depends on no argument at all (positions, causal masks, rotary tables) is computed again in every
  stage that uses it, instead of being sent;
- traced sizes have no stage: each stage reads them off a tensor that it has.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import fx

from penstock.capture.export import FromInput, Traced
from penstock.capture.flat import aten, body_module, is_pure, is_size, shares_memory, written
from penstock.capture.marks import Mark
from penstock.errors import CaptureError

EVERYWHERE = -1
Stages = dict[fx.Node, int]


class Placed(NamedTuple):
    """The stage of every node that has one; ``EVERYWHERE`` for values that each stage computes for itself."""

    flat: Traced
    num_stages: int
    stage: Stages


def place(flat: Traced, cuts: Sequence[Mark]) -> Placed:
    """Decide the stage of every node, for the given cuts."""
    transformed = _transformed(flat)
    if inside := [cut for cut in cuts if cut.position in transformed]:
        raise CaptureError(
            f"{inside[0].what} is inside a function that torch.vmap, or another transform of functions, runs: its values cannot "
            "leave it. Move the cut before or after it"
        )
    boundaries = [cut.position for cut in cuts]
    in_code = {node: bisect_right(boundaries, i) for i, node in enumerate(flat.nodes)}
    free = _free(flat)
    stage = _with_free_moved(flat, in_code, free, len(cuts))
    while idle := _busy(flat, in_code) - _busy(flat, stage):  # these stages keep what stands in their part of the code
        free = {node: depends for node, depends in free.items() if in_code.get(node) not in idle}
        stage = _with_free_moved(flat, in_code, free, len(cuts))
    _keep_tuples_whole(flat, stage)
    placed = Placed(flat, len(cuts) + 1, stage)
    _settle_writes(placed)
    _check_full(flat, stage, cuts)
    return placed


def inseparable(flat: Traced) -> set[int]:
    """The positions at which `place` would refuse a cut: between what one stage must do."""
    found = _transformed(flat)
    for i, node in enumerate(flat.nodes):
        for target in written(node):
            family = _family(target)
            used = {m: [flat.index.get(u, len(flat.nodes)) for u in m.users] for m in family}  # last, what is returned
            if any(m in flat.origins for m in family):  # one stage writes a buffer, before all others use it
                found |= set(range(min(min(users) for users in used.values() if users) + 1, i + 1))
            else:  # what is written to may come from another stage, but under one name
                made = {m: flat.index[m] for m in family}
                crosses = Counter(p for m in family for p in range(made[m] + 1, min(max(used[m], default=-1), i) + 1))
                found |= {p for p, members in crosses.items() if members > 1}
    return found


def _transformed(flat: Traced) -> set[int]:
    """The positions inside a function that torch.vmap or another transform runs: its values exist there alone."""
    found: set[int] = set()
    begun: list[int] = []
    for i, node in enumerate(flat.nodes):
        name = getattr(node.target, "__name__", "")
        if name.endswith("_increment_nesting"):
            begun.append(i)
        elif name.endswith("_decrement_nesting") and begun:
            found |= set(range(begun.pop() + 1, i + 1))
    return found


def _free(flat: Traced) -> dict[fx.Node, bool]:
    """The values that depend on nothing but arguments, buffers and constants -> whether they depend on an argument."""
    # A value that somebody writes to is not free, nor is what shares its memory.
    dirty = {member for node in flat.nodes for target in written(node) for member in _family(target)}
    free: dict[fx.Node, bool] = {}
    parameters = flat.parameters
    for node, origin in flat.origins.items():
        if node not in dirty and node not in parameters:
            free[node] = isinstance(origin, FromInput)
    for node in flat.nodes:
        if is_size(node) or body_module(node, flat.root) is not None:
            free[node] = False
        elif node not in dirty and all(a in free for a in node.all_input_nodes) and is_pure(node, flat.root):
            free[node] = any(free[a] for a in node.all_input_nodes)
    return free


def _with_free_moved(flat: Traced, in_code: Stages, free: Mapping[fx.Node, bool], last: int) -> Stages:
    """The stages by the code, but with what is free where it is first used."""
    stage = dict(in_code)
    for node in reversed(flat.nodes):
        if node not in free or is_size(node):
            continue
        users = [stage[u] for u in node.users if u in stage]
        if node in flat.outputs:
            users.append(last)
        if not free[node] and (len(set(users)) > 1 or EVERYWHERE in users):
            stage[node] = EVERYWHERE
        elif users:
            stage[node] = min(users)
    return stage


def _family(node: fx.Node) -> set[fx.Node]:
    """Everything that may share memory with `node`."""
    found, todo = {node}, [node]
    while todo:
        here = todo.pop()
        new = {*shares_memory(here), *(u for u in here.users if here in shares_memory(u))} - found
        found |= new
        todo += new
    return found


def _keep_tuples_whole(flat: Traced, stage: Stages) -> None:
    """The parts of a tuple are taken out where the tuple is made: only tensors travel."""
    for node in flat.nodes:
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            stage[node] = stage[node.args[0]]
        for arg in node.all_input_nodes:
            if body_module(arg, flat.root) is not None:
                stage[arg] = stage[node]


def _settle_writes(placed: Placed) -> None:
    """In-place operators on what another stage made write to a copy; a buffer is written by one stage only."""
    for node in list(placed.flat.nodes):
        for target in written(node):
            family = _family(target)
            states = [m for m in family if m in placed.flat.origins]
            if states:
                _settle_state(placed, states, family)
            else:
                _settle_value(placed, node, family)


def _settle_value(placed: Placed, node: fx.Node, family: set[fx.Node]) -> None:
    stage, index, outputs = placed.stage, placed.flat.index, placed.flat.outputs
    here = stage[node]
    earlier = [m for m in family if stage.get(m, here) < here]
    crossing = [m for m in earlier if any(stage.get(u, here) >= here for u in m.users)]
    if not crossing:
        return
    if len(crossing) > 1:
        raise CaptureError(
            f"{node.target} in stage {here} writes to a value that stage {stage[crossing[0]]} made and that reaches it "
            f"as {' and as '.join(m.name for m in crossing)}{_line(node)}; use the out-of-place form there, or move "
            "the cut"
        )
    (value,) = crossing
    users = [u for u in value.users if stage.get(u, -1) >= here or u.op == "output"]
    made = _cloned(placed, value, users, position=min(index[u] for u in users if u in index), at=here)
    outputs[:] = [made if output is value else output for output in outputs]


def _settle_state(placed: Placed, states: list[fx.Node], family: set[fx.Node]) -> None:
    flat, stage = placed.flat, placed.stage
    writers = {stage[n] for n in flat.nodes if any(t in family for t in written(n))}
    readers = {stage[u] for m in family for u in m.users if u in stage}
    names = ", ".join(flat.origins[state].name for state in states)
    if len(writers) > 1 or min(readers) < min(writers):
        raise CaptureError(
            f"buffer {names} is written by stages {sorted(writers)} and used by stages {sorted(readers)}: with "
            "microbatches in flight these would see different values. Move the cut so that one stage writes it first"
        )
    (owner,) = writers
    for member in list(family):
        later = [u for u in member.users if stage.get(u, owner) > owner]
        if later:
            after_all = 1 + max(flat.index[n] for n in flat.nodes if stage[n] == owner)
            _cloned(placed, member, later, position=after_all, at=owner)


def _cloned(placed: Placed, value: fx.Node, users: Sequence[fx.Node], *, position: int, at: int) -> fx.Node:
    """A copy of a value, which these users get instead, made by stage `at` before what stands at that position."""
    flat = placed.flat
    with value.graph.inserting_after(flat.nodes[position - 1]):
        made = value.graph.call_function(aten.clone.default, (value,))
    stack = next((user.meta["nn_module_stack"] for user in users if "nn_module_stack" in user.meta), None)
    made.meta = {"val": value.meta.get("val"), "nn_module_stack": stack}
    for user in users:
        user.replace_input_with(value, made)
    flat.nodes.insert(position, made)
    flat.index.update({node: i for i, node in enumerate(flat.nodes)})
    placed.stage[made] = at
    return made


def _line(node: fx.Node) -> str:
    trace = str(node.meta.get("stack_trace") or "").strip().splitlines()
    return f" ({trace[-2].strip()}: {trace[-1].strip()})" if len(trace) >= 2 else ""


def _busy(flat: Traced, stage: Mapping[fx.Node, int]) -> set[int]:
    """The stages that compute something."""
    return {stage[n] for n in flat.nodes if n.op != "get_attr" and not is_size(n)}


def _check_full(flat: Traced, stage: Stages, cuts: Sequence[Mark]) -> None:
    if empty := set(range(len(cuts) + 1)) - _busy(flat, stage):
        k = min(empty)
        side = "before" if k == 0 else "after" if k == len(cuts) else "between"
        marks = " and ".join(cut.what for cut in cuts[max(k - 1, 0) : k + 1])
        raise CaptureError(
            f"stage {k} would be empty: nothing is computed {side} {marks}. Remove one of the {len(cuts)} marks, or move it"
        )
