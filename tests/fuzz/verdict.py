"""What became of a case, and which errors are refusals that the docs announce."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass

import penstock

RIGHT, REFUSED, WRONG, ERROR, INVALID, HUNG = "right", "refused", "wrong", "error", "invalid", "hung"
OTHERS = "error of another"  # a rank that only heard of it
FINDINGS = (WRONG, ERROR, HUNG)

# Errors of penstock's that a step may end in, as the docs say; those while a pipeline is built all count as refusals.
ANNOUNCED = (r"a batch with fewer rows than microbatches|fewer rows than",)

# What torch cannot do with DTensors, with or without penstock.
OF_TORCH = (
    r"Cannot (flatten|unflatten|view) unevenly sharded tensor|Operator .* does not have a sharding strategy",
    r"got mixed torch.Tensor and DTensor|Sharding propagation failed",
)


@dataclass(frozen=True)
class Verdict:
    """One of the words above, a reason in a few words to count by, and all there is to say."""

    kind: str
    reason: str = ""
    details: str = ""

    @property
    def is_finding(self) -> bool:
        return self.kind in FINDINGS


def of_error(error: BaseException, *, built: bool) -> Verdict:
    """The verdict on an exception of penstock's or of others, before or after the pipeline was built."""
    text = f"{type(error).__name__}: {error}"
    details = "".join(traceback.format_exception(error))
    own = isinstance(error, penstock.errors.PenstockError) and not isinstance(error, penstock.errors.PeerFailed)
    if own and (not built or any(re.search(pattern, text) for pattern in ANNOUNCED)):
        return Verdict(REFUSED, shortened(text), details)
    if any(re.search(pattern, text) for pattern in OF_TORCH):
        return Verdict(REFUSED, shortened(f"by torch: {text}"), details)
    return Verdict(ERROR, shortened(text), details)


def shortened(text: str) -> str:
    """The first line without what differs from case to case, to count by."""
    line = re.sub(r"[0-9.]*[0-9][0-9.e+-]*", "N", text.strip().splitlines()[0])
    return line[:110]
