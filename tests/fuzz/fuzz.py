"""The loop: cases from consecutive numbers, what became of each, findings made small and written down."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.cases import Case
from tests.fuzz.generate import generate
from tests.fuzz.known import known
from tests.fuzz.script import script
from tests.fuzz.shrink import shrink
from tests.fuzz.verdict import INVALID, REFUSED, RIGHT, Verdict

MOST_REFUSED = 0.10  # share of the cases that may be refused, or not be run by the loop: more would test too little

Run = Callable[[Case], Verdict]


@dataclass
class Fuzz:
    """Runs cases and counts."""

    run: Run
    with_known: bool = False
    size: str = "usual"  # of the cases, as `generate` has it
    seconds: float = 90.0  # for making one finding smaller
    folder: Path | None = None  # where findings go, as scripts
    say: Callable[[str], object] = print
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[Case, Verdict]] = field(default_factory=list)

    def seed(self, seed: int, *, only: str | None = None) -> None:
        """Generate a case and run it, unless it would find again what is known."""
        case = generate(seed, only=only, size=self.size)
        defect = None if self.with_known else known(case)
        if defect is not None:
            self.left_out[defect] += 1
            return
        self.case(case, name=f"{only or 'threads'}-{seed}")

    def case(self, case: Case, *, name: str) -> None:
        verdict = self.run(case)
        self.outcomes[verdict.kind] += 1
        if verdict.kind != RIGHT:
            self.reasons[f"{verdict.kind}: {verdict.reason}"] += 1
        if verdict.is_finding:
            self.finding(case, verdict, name)

    def finding(self, case: Case, verdict: Verdict, name: str) -> None:
        """Make it smaller, and write it down as a script; the same reason is written down three times at most."""
        key = f"{verdict.kind}: {verdict.reason}"
        if self.reasons[key] > 3:
            return
        self.say(f"{name}: {key}\n{case.dumps()}")
        found = [(case, verdict)]

        def fails(smaller: Case) -> bool:
            again = self.run(smaller)
            if again.kind == verdict.kind and (again.kind != "error" or _same(again, verdict)):
                found.append((smaller, again))
                return True
            return False

        shrink(case, fails, seconds=self.seconds)
        case, verdict = found[-1]
        self.findings.append((case, verdict))
        self.say(f"made smaller: {case.dumps()}\n{verdict.details}")
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{name}.py"
            path.write_text(script(case, f"{verdict.kind}: {verdict.reason}", name=path.name))
            self.say(f"written to {path}")

    @property
    def refused(self) -> float:
        """The share of the cases that said nothing of penstock's numbers."""
        total = sum(self.outcomes.values())
        return (self.outcomes[REFUSED] + self.outcomes[INVALID]) / total if total else 0.0

    def table(self, began: float) -> str:
        """All counts."""
        lines = [f"{sum(self.outcomes.values())} cases in {time.monotonic() - began:.0f} s"]
        lines += [f"  {count:6} {kind}" for kind, count in self.outcomes.most_common()]
        lines += [f"  {count:6} {reason}" for reason, count in self.reasons.most_common()]
        lines += [f"  {count:6} left out, known: {name}" for name, count in self.left_out.most_common()]
        return "\n".join(lines)


def _same(one: Verdict, other: Verdict) -> bool:
    return one.reason.partition(":")[0] == other.reason.partition(":")[0]
