"""Which options of a Pipeline must be the same on every rank, compared before anything else is done, and which are a rank's own.

    compare(options, ends)      # RanksDisagree on every rank, with the options that differ and what each rank gave

Most options decide what ranks do together: which meetings they hold, which plan they run, how they cut a batch. If one rank goes
by another value, ranks mix up messages, wait for one another, or pair rows that do not belong together. Every option is in one
of the two tables here: a test walks them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor

from penstock.balance import Profile
from penstock.errors import RanksDisagree
from penstock.front.mesh import PipelineMesh
from penstock.nest import Value
from penstock.plan import Plan
from penstock.run.meeting import digest_of
from penstock.schedules import Recipe
from penstock.stage.pipeline_stage import PipelineStage

_LONGEST = 60  # characters of a description; the rest of it is told by a digest


def described(value: object) -> str:
    """A value in words that are the same in every process: no addresses, and of tensors no numbers.

    >>> described({"backend": "eager", "sizes": [1, 2.5]}), described(torch.zeros(2, 3))
    ("{'backend': 'eager', 'sizes': [1, 2.5]}", 'float32[2, 3]')
    >>> described(described), described(torch.nn.ReLU())
    ('described', 'ReLU')
    """
    text = _words(value, 6)
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 16]}... {hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _words(value: Value, depth: int) -> str:
    match value:
        case None | bool() | int() | float() | str() | Enum():
            return str(value) if isinstance(value, Enum) else repr(value)
        case Path():
            return repr(str(value))
        case Tensor():
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        case torch.dtype() | torch.device():
            return str(value)
        case _ if depth == 0:
            return type(value).__qualname__
        case list() | tuple():
            inside = ", ".join(_words(one, depth - 1) for one in value)
            return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
        case set() | frozenset() | range():
            return "{" + ", ".join(sorted(_words(one, depth - 1) for one in value)) + "}"
        case Mapping():
            pairs = [f"{_words(key, depth - 1)}: {_words(one, depth - 1)}" for key, one in value.items()]
            return "{" + ", ".join(pairs) + "}"
        case _ if is_dataclass(value) and not isinstance(value, type):
            inside = ", ".join(f"{f.name}={_words(getattr(value, f.name), depth - 1)}" for f in fields(value) if f.repr)
            return f"{type(value).__qualname__}({inside})"
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else type(value).__qualname__


def given(value: object) -> str:
    """Whether there is one: what it is may differ, or cannot be compared."""
    return "none" if value is None else "given"


def _schedule(value: object) -> str:
    if isinstance(value, Plan):
        return f"the plan {value.name or 'made by hand'} {digest_of(value)[:8]}"
    return value.name if isinstance(value, Recipe) else repr(value)


def _stages(value: object) -> str:
    made = isinstance(value, list | tuple) and any(isinstance(one, PipelineStage) for one in value)
    return "made by hand" if made else described(value)


def _profile(value: object) -> str:
    if value is None or value is False:
        return "measured now" if value is None else "False"
    return "a Profile" if isinstance(value, Profile) else "a file"  # its owner alone reads it


Describe = Callable[[Value], str]
COMPARED: dict[str, Describe] = {
    "model": lambda model: "none" if model is None else type(model).__qualname__,
    "example": described,
    "loss_fn": given,  # only the last stage calls it
    "schedule": _schedule,
    "microbatches": described,
    "example_kwargs": described,
    "example_target": described,
    "weights": given,  # files may lie elsewhere on each host
    "init": given,
    "stages": _stages,
    "num_stages": described,
    "placement": described,
    "memory_limit": described,
    "optimizer_bytes": described,
    "optimizer": given,
    "profile": _profile,
    **dict.fromkeys(("split_spec", "split_policy", "dynamic_shapes"), described),
    **dict.fromkeys(("output_loss_value_spec", "multi_use_param_spec", "compile"), described),
    **dict.fromkeys(("parallelize", "data_parallel"), described),
    "loss_scale": given,
    "loss_weight": given,  # only the last stage calls it
    "run_folder": given,  # each rank has a file of its own there
    **dict.fromkeys(("collect_every", "share_loss", "few_rows", "group_rows", "replan"), described),
    **dict.fromkeys(("scale_grads", "seed", "rng", "recompute", "offload", "ties", "dynamic", "receives"), described),
    "offload_to": given,  # a folder of this host
    **dict.fromkeys(("args_chunk_spec", "kwargs_chunk_spec", "target_chunk_spec", "output_merge_spec"), described),
}
"""How each option is told to the other ranks; where the words differ, the ranks disagree."""

OWN: dict[str, str] = {
    "group": "each rank has its own place in it, and it says who is asked at all",
    "mesh": "it says who is asked at all",
    "device": "ranks have devices of their own; their kind is compared before the first step",
}
"""Options that may differ from rank to rank, and why."""


def compare(options: Mapping[str, Value], ends: PipelineMesh) -> None:
    """Raise RanksDisagree on every rank of every replica, if an option that must be the same differs."""
    facts = {name: describe(options[name]) for name, describe in COMPARED.items()}
    everyone = ends.ranks.try_all("comparing the options of a pipeline", lambda: facts)
    replicas = [everyone[first : first + ends.num_ranks] for first in range(0, len(everyone), ends.num_ranks)]
    unlike = [
        name for name in COMPARED if any(_differs(name, one) for one in (replicas if name == "seed" else [everyone]))
    ]
    if not unlike:
        return
    lines = []
    for name in unlike:
        ranks: dict[str, list[int]] = {}
        for number, one in enumerate(everyone):
            ranks.setdefault(one[name], []).append(number)
        lines += [f"{name}={text} on rank{'s' * (len(on) > 1)} {_listed(on)}" for text, on in ranks.items()]
    rows = "".join(f"\n  {line}" for line in lines)
    raise RanksDisagree(
        f"the options of the pipeline differ between the ranks:{rows}\nGive every rank the same options"
    )


def _differs(name: str, facts: Sequence[Mapping[str, str]]) -> bool:
    return len({one[name] for one in facts}) > 1


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} others" if len(ranks) > 8 else "")
