"""Defects that are known and not mended yet: cases that would only find them again are left out, unless `--known` is given.

One entry a defect, with its reason. An entry goes when its defect is mended.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.cases import Case

Predicate = Callable[[Case], bool]


def _again(case: Case) -> bool:
    """Whether a forward is run a second time."""
    return (
        "recompute" in case.options or "memory_limit" in case.options or any(a.get("recompute") for a in case.actions)
    )


def _splits(case: Case) -> bool:
    """Whether a backward is made in two parts, or may be."""
    whole = ("gpipe", "1f1b", "loopedbfs", "interleaved1f1b", "gis")
    names = [case.schedule, *(a["schedule"] for a in case.actions if "schedule" in a)]
    names += [a["to"]["schedule"] for a in case.actions if a.get("to", {}).get("schedule")]
    return any(name not in whole for name in names)


KNOWN: dict[str, Predicate] = {
    # An output becomes contiguous on its way, and products in bfloat16 are rounded by how what they read is laid out.
    "smaller types after other strides": lambda case: {"half", "strides"} <= case.traits,
    # A conjugated output of a compiled stage.
    "complex numbers in compiled stages": lambda case: "complex" in case.traits and "compile" in case.options,
    # The parametrisation's buffers are written by evaluate when its parts are in two stages.
    "spectral norm that is captured": lambda case: case.captured and "spectral" in case.traits,
    # The profile runs a forward again, and its sparse gradient cannot be measured.
    "sparse embedding with recompute": lambda case: "sparse" in case.traits and _again(case),
    # State that is no buffer is touched again by a second forward.
    "state that is no buffer in a second forward": lambda case: (
        "python" in case.traits and ("compiled" in case.traits or _splits(case))
    ),
    # A weight that is used outside its layer in some microbatches: hooks fire more often under a split backward.
    "hooks of a weight used outside its layer": lambda case: (
        bool(case.traits & {"outside"}) and "count_hooks" in case.options and _splits(case)
    ),
    # What fully_shard gathers is moved away with what a forward saved, and cannot be freed then.
    "offload of captured stages under FSDP": lambda case: (
        case.captured and "offload" in case.options and case.mesh.get("kind") == "fsdp"
    ),
    # Where weight work is put off, the output of a linear layer is a view of a function of penstock's.
    "writes in place to a linear layer's output, offloaded, under a split backward": lambda case: (
        "in place" in case.traits and "offload" in case.options and _splits(case)
    ),
}


def known(case: Case) -> str | None:
    """The name of a known defect that this case may run into."""
    return next((name for name, predicate in KNOWN.items() if predicate(case)), None)
