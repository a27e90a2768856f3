"""How long `balance` takes on large profiles. Run: python benchmarks/balance.py"""

from __future__ import annotations

import random
import sys
import time

from penstock.balance import LayerCost, Profile, balance

KiB = 1024


def even(count: int, seed: int = 0) -> Profile:
    """Layers of about the same cost."""
    rng = random.Random(seed)
    return Profile(
        tuple(
            LayerCost(
                f"node{i}", rng.uniform(0.5, 1.5), rng.uniform(0.5, 1.5), rng.uniform(0.5, 1.5),
                rng.randrange(64, 128) * KiB, rng.randrange(16, 32) * KiB, rng.randrange(256) * KiB,
                rng.randrange(64) * KiB,
            )
            for i in range(count)
        )
    )  # fmt: skip


def graph(count: int, seed: int = 0) -> Profile:
    """Nodes of a traced transformer: few expensive ones, many that cost next to nothing, skips around them."""
    rng = random.Random(seed)
    layers = []
    for i in range(count):
        heavy = i % 6 == 0
        time_ = rng.uniform(0.9, 1.1) if heavy else rng.uniform(0.0, 0.02)
        layers.append(
            LayerCost(
                f"node{i}", time_, time_, time_ if heavy else 0.0, 64 * KiB, 64 * KiB * heavy, 1024 * KiB * heavy,
                64 * KiB,
                last_use=min(count - 1, i + 6) if heavy else None,
            )
        )  # fmt: skip
    return Profile(tuple(layers))


def lopsided(count: int, seed: int = 0) -> Profile:
    """A head that outweighs the rest of a stage by far: most cuts are equally good, ties decide."""
    layers = even(count, seed).layers
    head = LayerCost("head", sum(layer.total for layer in layers) / 8)
    return Profile((*layers[:-1], head), metadata={"kind": "lopsided"})


def one_f_one_b(stage: int) -> int:
    return 64 - stage


CASES = {
    "64 stages": {},
    "64 stages, bandwidth": {"bandwidth": 512.0 * KiB},
    "64 stages, memory limit": {"memory_limit": 160 * 1024 * KiB, "microbatches_in_flight": one_f_one_b},
    "64 stages on 32 ranks, V": {"placement": "v", "num_ranks": 32},
    "64 stages on 32 ranks, loop, memory limit": {
        "num_ranks": 32, "memory_limit": 400 * 1024 * KiB, "microbatches_in_flight": one_f_one_b,
    },
}  # fmt: skip


def main() -> None:
    write = sys.stdout.write
    for make in (even, graph, lopsided):
        profile = make(1000)
        for name, options in CASES.items():
            begin = time.perf_counter()
            cuts = balance(profile, 64, **options)  # type: ignore[arg-type]
            seconds = time.perf_counter() - begin
            fullest = f"fullest rank {max(cuts.rank_memory) / KiB / KiB:.0f} MiB"
            write(f"1,000 {make.__name__:9} {name:42} {seconds:6.2f} s   slowest {cuts.slowest:.4f}, {fullest}\n")
    for count, stages, placement in ((34, 8, "v"), (34, 16, "v"), (34, 8, "loop"), (66, 16, "v"), (66, 16, "loop")):
        begin = time.perf_counter()
        cuts = balance(even(count), stages, num_ranks=stages // 2, placement=placement, objective="rank")  # type: ignore[arg-type]
        write(f"{count} layers, {stages} stages, {placement:4}, slowest rank {time.perf_counter() - begin:6.2f} s\n")


if __name__ == "__main__":
    main()
