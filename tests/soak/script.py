"""What an episode of the soak does, all drawn from one seed: sizes, schedule, model, options, and what happens in each step.

    script = Script.of(7, num_ranks=2, num_steps=40)
    print(script)                      # enough to see what went before a failure

Every rank makes the same script, so nobody needs to be told.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from penstock.plan import Plan
from penstock.schedules import all_schedules

EXCEPTIONS = ("forward", "backward", "loss", "hook")
SURVIVED = (*EXCEPTIONS, "pause", "disk", "evaluate")
LAST = ("kill", "stop")  # after these the group is of no use any more
TRAINING = [recipe for recipe in all_schedules() if recipe.name != "forward"]


@dataclass(frozen=True)
class Event:
    """What happens in one step, to one stage (or to the rank that holds it) at one microbatch."""

    step: int
    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"step {self.step}: {self.kind} at stage {self.stage}, microbatch {self.microbatch}"


@dataclass(frozen=True)
class Script:
    """One episode."""

    seed: int
    recipe: str
    num_ranks: int
    stages_per_rank: int
    num_microbatches: int
    width: int
    depth: int  # blocks of a stage
    dropout: bool
    dynamic: bool
    rows: tuple[int, ...]  # of the batch of each step
    events: tuple[Event, ...] = field(default=())

    @classmethod
    def of(cls, seed: int, *, num_ranks: int, num_steps: int, deadly: bool = True) -> Script:
        """The first of a million has every kind of fault that is survived, and ends with a kill; the second one ends with a stop.
        Of the others one in three ends with a kill or a stop, if those are allowed (`deadly`)."""
        dice, number = random.Random(seed), seed % 1_000_000
        recipe = dice.choice(TRAINING)
        per_rank = recipe.stages_per_rank or dice.choice((1, 2))
        count = dice.choice((1, 2, 4, 5))
        stages = num_ranks * per_rank
        sizes = [count * dice.choice((1, 2)) + dice.choice((0, 0, 1)) for _ in range(3)]
        events = [cls._event(dice, step, stages, count) for step in range(num_steps) if dice.random() < 0.3]
        if number == 0:
            events = [cls._event(dice, 1 + step, stages, count, kind) for step, kind in enumerate(SURVIVED)]
        end = dice.choice(LAST) if deadly and dice.random() < 0.3 else ""
        if deadly and number < len(LAST):
            end = LAST[number]
        if end:
            events = [event for event in events if event.step < num_steps - 1]
            events.append(Event(num_steps - 1, end, *cls._place(dice, stages, count)))
        return cls(
            seed,
            recipe.name,
            num_ranks,
            per_rank,
            count,
            width=dice.choice((4, 6, 64)),
            depth=dice.choice((1, 2)),
            dropout=dice.random() < 0.3,
            dynamic=dice.random() < 0.2,
            rows=tuple(dice.choice(sizes) for _ in range(num_steps)),
            events=tuple(events),
        )

    @classmethod
    def _event(cls, dice: random.Random, step: int, stages: int, microbatches: int, kind: str = "") -> Event:
        kind = kind or dice.choice(SURVIVED)
        stage, microbatch = cls._place(dice, stages, microbatches)
        return Event(step, kind, stages - 1 if kind == "loss" else stage, microbatch)

    @staticmethod
    def _place(dice: random.Random, stages: int, microbatches: int) -> tuple[int, int]:
        return dice.randrange(stages), dice.randrange(microbatches)

    def plan(self) -> Plan:
        recipe = next(recipe for recipe in TRAINING if recipe.name == self.recipe)
        return recipe(self.num_ranks, self.num_microbatches, stages_per_rank=self.stages_per_rank)

    def event(self, step: int) -> Event | None:
        return next((event for event in self.events if event.step == step), None)

    def __str__(self) -> str:
        head = (
            f"seed {self.seed}: {self.recipe} on {self.num_ranks} ranks with {self.stages_per_rank} stages each, "
            f"{self.num_microbatches} microbatches, width {self.width}, depth {self.depth}, "
            f"{'dropout, ' if self.dropout else ''}{'dynamic, ' if self.dynamic else ''}{len(self.rows)} steps"
        )
        return "\n  ".join([head, *map(str, self.events)])
