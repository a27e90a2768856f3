"""Selection of the engine of each microbatch, by the actions that the plan has for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from penstock.backward.engine_protocol import BackwardEngine
from penstock.plan import Op

Make = Callable[[], BackwardEngine]
Decorate = Callable[[BackwardEngine], BackwardEngine]


class Engines(NamedTuple):
    """How the engines of a stage are made."""

    full: Make
    split: Make
    recomputed: Decorate
    offloaded: Decorate

    def select(self, actions: Iterable[tuple[Op, int | None]], num_microbatches: int) -> list[BackwardEngine]:
        """Return the engine of each microbatch. Microbatches with the same kinds of actions share one."""
        ops: list[set[Op]] = [set() for _ in range(num_microbatches)]
        for op, microbatch in actions:
            if microbatch is not None:
                ops[microbatch].add(op)
        made: dict[frozenset[Op], BackwardEngine] = {}
        found = []
        for kinds in ops:
            base = frozenset({Op.I} & kinds)
            if base not in made:
                made[base] = self.split() if base else self.full()
            engine, key = made[base], frozenset(kinds & {Op.I, Op.R, Op.O})
            if key not in made:
                if Op.R in kinds:
                    engine = self.recomputed(engine)
                if Op.O in kinds:
                    engine = self.offloaded(engine)
                made[key] = engine
            found.append(made[key])
        return found
