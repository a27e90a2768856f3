"""The soak: random models, schedules, sizes, faults and recoveries, for as long as one likes.

    make soak SECONDS=3600 SEED=7
    python -m tests.soak.soak --seconds 3600 --seed 7
    python -m tests.soak.soak --episode 7000012        # that one again, alone

Steps fail on all ranks or on none, every good step has the gradients of a plain loop, and processes that live through many
episodes do not grow. A failure prints the script of its episode and what each rank told.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.faults.test_heartbeat import NoNamespaces, cut_the_network, two_hosts
from tests.gloo_pool import GlooPool, Outcome
from tests.soak.episode import Told, play, resume
from tests.soak.script import EXCEPTIONS, LAST, Script
from tests.soak.threads import threads_episode

_BETWEEN_CUTS = 20  # episodes
_WARM = 4  # episodes until a process has imported, compiled and cached what it will
_SLACK = {"threads": 4, "descriptors": 24, "memory": 48 << 20}  # of one late import or cache, not of many episodes
_BETWEEN = {"threads": 0, "descriptors": 4, "memory": 24 << 20, "keys": 8}  # within an episode


class Wrong(AssertionError):
    """Something that must not be; the text is enough to do it again."""


@dataclass
class Soak:
    """A run of episodes: ``Soak(seed=7).run(seconds=40)``."""

    seed: int
    num_ranks: int = 2
    num_steps: int = 40
    episodes: int = 0
    steps: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    recovered: int = 0  # times that a job went on from its checkpoint after a kill
    uncut: str = ""  # why there was no network to cut
    history: dict[int, list[Told]] = field(default_factory=dict)  # by process

    def run(self, seconds: float, *, pool: GlooPool) -> None:
        """Episodes until the time is over; but first each kind of fault once: those of the first scripts, and a cut network."""
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="penstock-soak-") as folder:
            while time.monotonic() - start < seconds or self.episodes < len(LAST):
                number = self.seed * 1_000_000 + self.episodes
                threads_episode(number)
                self.play(number, pool=pool, folder=folder)
                if self.episodes % _BETWEEN_CUTS == len(LAST):
                    self.cut_the_network()
        self.check_growth()

    def cut_the_network(self) -> None:
        """Between two hosts, where this machine can pretend to be two."""
        try:
            with two_hosts() as hosts:
                cut_the_network(hosts)
        except NoNamespaces as reason:
            self.uncut = str(reason)
            return
        self.faults["network"] = self.faults.get("network", 0) + 1

    def play(self, number: int, *, pool: GlooPool, folder: str) -> None:
        script = Script.of(number, num_ranks=self.num_ranks, num_steps=self.num_steps)
        found = pool.outcomes(self.num_ranks, play, script, folder, store="tcp", timeout=300.0)
        self.episodes += 1
        for event in script.events:
            self.faults[event.kind] = self.faults.get(event.kind, 0) + 1
        wrong = list(self.faults_of(script, found))
        if wrong:
            told = "\n".join(f"rank {one.rank}: {one.error or one.value.outcomes}\n{one.details}" for one in found)
            raise Wrong("\n".join([*wrong, str(script), told, f"again: python -m tests.soak.soak --episode {number}"]))
        for one in found:
            if one.ok:
                self.steps += one.rank == 0 and one.value.outcomes.count("fine")
                self.history.setdefault(one.value.process, []).append(one.value)
        if script.events and script.events[-1].kind == "kill":
            self.recover(script, pool=pool, folder=folder)

    def recover(self, script: Script, *, pool: GlooPool, folder: str) -> None:
        """After a kill: the job is started again, and goes on from the checkpoint of before."""
        for rank, told in enumerate(pool.run(self.num_ranks, resume, script, folder, store="tcp", timeout=300.0)):
            if told.wrong or told.outcomes != ["fine"]:
                raise Wrong(f"rank {rank} after a kill, from the checkpoint: {told.outcomes} {told.wrong}\n{script}")
        self.recovered += 1

    def faults_of(self, script: Script, found: Sequence[Outcome]) -> list[str]:
        """What is wrong with an episode."""
        wrong, last = [], script.event(self.num_steps - 1)
        victim = script.plan().placement.rank_of(last.stage) if last is not None and last.kind == "kill" else None
        for one in found:
            if one.rank == victim and one.exit_code != -9:
                wrong.append(f"rank {one.rank} was to be killed, and was not")
            elif one.rank != victim and not one.ok:
                wrong.append(f"rank {one.rank} ended with {one.error}")
            elif one.rank != victim:
                wrong += [f"rank {one.rank}: {text}" for text in one.value.wrong]
                wrong += [
                    f"rank {one.rank}: {name} grew by {grown} within the episode"
                    for name, grown in one.value.growth.items()
                    if grown > _BETWEEN[name]
                ]
        outcomes = [one.value.outcomes for one in found if one.ok]
        for step, kinds in enumerate(zip(*outcomes, strict=True)):
            event = script.event(step)
            fails = event is not None and event.kind in (*EXCEPTIONS, *LAST)
            if any((kind == "fine") is fails for kind in kinds):
                wrong.append(f"step {step}, {event}: the ranks ended with {', '.join(kinds)}")
        return wrong

    def check_growth(self) -> None:
        """Processes that have played many episodes are no larger at their end than when they were warm."""
        for process, told in self.history.items():
            warm = told[_WARM:]
            if len(warm) < 6:
                continue
            third = len(warm) // 3
            for name, slack in _SLACK.items():
                first, last = (
                    statistics.median(getattr(one, name) for one in part) for part in (warm[:third], warm[-third:])
                )
                if last - first > slack:
                    raise Wrong(f"process {process}: {name} grew from {first:,} to {last:,} in {len(warm)} episodes")

    def __str__(self) -> str:
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        return f"seed {self.seed}: {self.episodes} episodes, {self.steps} good steps; {faults}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Random faults and recoveries, for as long as one likes.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100, help="of an episode")
    parser.add_argument("--episode", type=int, help="play this one alone, as a failure names it")
    given = parser.parse_args()
    soak = Soak(given.seed, given.ranks, given.steps)
    pool = GlooPool()
    try:
        if given.episode is not None:
            threads_episode(given.episode)
            with tempfile.TemporaryDirectory(prefix="penstock-soak-") as folder:
                soak.play(given.episode, pool=pool, folder=folder)
        else:
            soak.run(given.seconds, pool=pool)
    finally:
        pool.close()
        sys.stdout.write(f"{soak}\n")


if __name__ == "__main__":
    main()
