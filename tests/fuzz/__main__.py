"""The fuzzer on the command line.

    python -m tests.fuzz --seconds 3600 --seed 0
    python -m tests.fuzz --only replicas --seconds 600
    python -m tests.fuzz --case '{"blocks": ["linear", "mlp"]}'

`make fuzz SECONDS=3600 SEED=0` does the first. Findings are printed and written to build/fuzz as scripts that run alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.fuzz.cases import Case
from tests.fuzz.fuzz import MOST_REFUSED, Fuzz
from tests.fuzz.generate import RUNS
from tests.fuzz.pooled import runner
from tests.gloo_pool import GlooPool

ROUND = ("threads", "threads", "threads", "threads", "replicas", "threads", "threads", "tensor")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="begin no case after so many seconds")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first case; the others follow")
    parser.add_argument("--only", choices=RUNS, help="cases of this run alone; else of all")
    parser.add_argument("--case", help="run this one, in JSON, and make it smaller if it fails")
    parser.add_argument("--known", action="store_true", help="also cases that find defects which are known already")
    parser.add_argument("--long", action="store_true", help="also what takes long: inductor")
    parser.add_argument(
        "--processes", action=argparse.BooleanOptionalAction, default=True, help="also ranks as processes"
    )
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"), help="where findings are written to")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    pool = GlooPool()
    fuzz = Fuzz(runner(pool), with_known=given.known, size="long" if given.long else "usual", folder=given.folder)
    began = time.monotonic()
    try:
        if given.case is not None:
            fuzz.case(Case.loads(given.case), name="case")
        else:
            play(fuzz, given, began)
    finally:
        pool.close()
        sys.stdout.write(fuzz.table(began) + "\n")
    if fuzz.refused > MOST_REFUSED:
        sys.stdout.write(f"{fuzz.refused:.0%} of the cases were refused; at most {MOST_REFUSED:.0%} may be\n")
    return int(bool(fuzz.findings) or fuzz.refused > MOST_REFUSED)


def play(fuzz: Fuzz, given: argparse.Namespace, began: float) -> None:
    seed = given.seed
    while time.monotonic() - began < given.seconds:
        turn = ROUND[seed % len(ROUND)] if given.processes else "threads"
        fuzz.seed(seed, only=given.only or (None if turn == "threads" else turn))
        seed += 1


if __name__ == "__main__":
    sys.exit(main())
