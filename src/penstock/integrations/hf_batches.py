"""Batches as transformers' collators make them: padded, packed, of changing lengths, with labels of which some do not count."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from penstock.batch import Microbatches
from penstock.batch.batch import Batch, Shares
from penstock.errors import SplitError
from penstock.nest import Value

IGNORED = -100  # the label of a place that does not count
ITEMS = "num_items_in_batch"
# Of texts in a row, as numbers that would differ from batch to batch; position_ids say the same.
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# What a batch means that leaves these out, by the sizes of its tokens.
_MEANT: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "attention_mask": lambda sizes: torch.ones(sizes, dtype=torch.long),
    "position_ids": lambda sizes: torch.arange(sizes[-1]).expand(sizes).contiguous(),
    "token_type_ids": lambda sizes: torch.zeros(sizes, dtype=torch.long),
    # The bounds of an answer: a place behind the last token counts for nothing.
    "start_positions": lambda sizes: torch.full(sizes[:1], sizes[-1], dtype=torch.long),
    "end_positions": lambda sizes: torch.full(sizes[:1], sizes[-1], dtype=torch.long),
}
_ANYWHERE = (ITEMS, "return_dict", "use_cache", *BOUNDS)  # what a model may be called with whatever the example had


def label_shares(
    otherwise: Callable[[Batch, Sequence[float]], Shares], batch: Batch, by_rows: Sequence[float]
) -> Shares:
    """Weigh a microbatch by its labels, not by its rows; without labels in the arguments as `otherwise` weighs it."""
    counts = [count_labels(one, shifted=False) for one in batch.kwargs]
    total = sum(n or 0 for n in counts)
    if not total or None in counts:
        return otherwise(batch, by_rows)
    return [(n or 0) / total for n in counts]


def count_labels(batch: Mapping[str, Value], *, shifted: bool) -> int | None:
    """How many labels count. With `shifted`, a model predicts the next token, so the first of each row is no target."""
    labels = batch.get("shift_labels", batch.get("labels"))
    if not isinstance(labels, Tensor):
        return None
    if shifted and "shift_labels" not in batch and labels.dim() > 1:
        labels = labels[..., 1:]
    return int((labels != IGNORED).sum())


def keeps_texts_apart(model: nn.Module) -> bool:
    """Whether no token of the model sees another text of a packed row: not if it looks both ways, or goes through states."""
    return not any(
        getattr(module, "is_causal", True) is False or getattr(module, "_is_stateful", False)
        for module in model.modules()
    )


def texts_apart(batch: Mapping[str, Value], count: int, *, shifted: bool) -> dict[str, Value]:
    """A packed row (`DataCollatorWithFlattening`) as up to `count` microbatches, cut between its texts; else the batch as it is.

    Texts begin where transformers' masks say so: where `position_ids` do not go on by one. No token sees another text, so each
    microbatch is a packed row of its own. With `shifted` labels a text whose first label counts belongs to the text before it.
    """
    ids, positions = batch.get("input_ids", batch.get("inputs_embeds")), batch.get("position_ids")
    if not isinstance(ids, Tensor) or not isinstance(positions, Tensor) or batch.get("attention_mask") is not None:
        return dict(batch)
    if ids.shape[0] != 1 or positions.shape != ids.shape[:2]:
        return dict(batch)
    begins = positions[0].diff() != 1
    labels = batch.get("labels", batch.get("target"))
    if shifted and isinstance(labels, Tensor) and labels.shape == positions.shape:
        begins &= labels[0, 1:] == IGNORED
    bounds = _even([0, *(begins.nonzero().flatten() + 1).tolist(), ids.shape[1]], count)
    along = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim()}
    if len(bounds) == 2 or any(value.shape[:2] != ids.shape[:2] for value in along.values()):
        return dict(batch)
    apart = {name: Microbatches([value[:, a:b] for a, b in pairwise(bounds)]) for name, value in along.items()}
    return {**batch, **apart}


def _even(bounds: list[int], count: int) -> list[int]:
    """Of these bounds those of at most `count` parts of about the same length."""
    count = min(count, len(bounds) - 1)
    chosen = [0]
    for k in range(1, count):
        free = range(chosen[-1] + 1, len(bounds) - (count - k))
        chosen.append(min(free, key=lambda n: abs(bounds[n] - bounds[-1] * k / count)))
    return [bounds[n] for n in chosen] + bounds[-1:]


def open_sizes(example: Mapping[str, Value]) -> dict[str, Value]:
    """`dynamic_shapes`: the rows, and the length of whatever is as long as the tokens."""
    auto = torch.export.Dim.AUTO
    of_tokens = _of_tokens(example) or ()
    last = len(of_tokens) - 1
    found = {}
    for name, value in example.items():
        if isinstance(value, Tensor) and value.dim():
            long = value.dim() > last > 0 and value.shape[last] == of_tokens[last]
            found[name] = {0: auto, **({last: auto} if long else {})}
    return found


def _of_tokens(batch: Mapping[str, Value]) -> tuple[int, ...] | None:
    """The sizes of what has a number for each token: rows, and length; several texts of a row are between these."""
    ids, embedded = batch.get("input_ids"), batch.get("inputs_embeds")
    if isinstance(ids, Tensor):
        return tuple(ids.shape)
    return tuple(embedded.shape[:2]) if isinstance(embedded, Tensor) else None


def completed(batch: Mapping[str, Value], example: Mapping[str, Tensor | None]) -> dict[str, Value]:
    """The batch with what the example had and this one leaves out, where only one thing can be meant.

    `example` has tensors without data, and None for what is no tensor.
    """
    extra = [name for name, value in batch.items() if value is not None and name not in {*example, *_ANYWHERE}]
    if extra:
        raise SplitError(
            f"the batch has {', '.join(extra)}, and the example of the pipeline had {', '.join(example)}; make the pipeline "
            f"with an example that has {', '.join(extra)} too"
        )
    made = {name: value for name, value in batch.items() if name in example}
    first = next((value for value in made.values() if isinstance(value, Tensor) and value.dim()), None)
    if first is None:
        return made
    of_tokens = _of_tokens(made)
    for name in [name for name, known in example.items() if known is not None and name not in made]:
        if name == "labels":
            made[name] = _no_labels(example, of_tokens or (len(first),)).to(first.device)
        elif of_tokens is not None and name in _MEANT:
            made[name] = _MEANT[name](of_tokens).to(first.device)
    return made


def _no_labels(example: Mapping[str, Value], sizes: tuple[int, ...]) -> Tensor:
    """Labels of which none counts: one for each token, or as many for a row as the example has."""
    known = example["labels"]
    each = not known.is_floating_point() and tuple(known.shape) == _of_tokens(example)
    return torch.full(sizes if each else (sizes[0], *known.shape[1:]), IGNORED, dtype=known.dtype)
