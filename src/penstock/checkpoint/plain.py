"""Small states as JSON and back: those of schedulers, scalers, data loaders and random generators.

text = json.dumps(encode(scheduler.state_dict()))
scheduler.load_state_dict(decode(json.loads(text)))

`decode` makes numbers, texts, containers and tensors, whatever the text says; it never calls anything by name.
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict, deque

import torch

from penstock.dtypes import dtype_name, dtype_named
from penstock.errors import RunError
from penstock.nest import Value

_KIND, _VALUE = "~", "is"  # of a value that JSON does not know: {"~": "tuple", "is": [1, 2]}
_CONTAINERS = {kind.__name__: kind for kind in (tuple, set, frozenset, deque, dict, Counter, OrderedDict)}


def encode(value: Value) -> Value:
    """A value that `json.dumps` takes; `decode` is the inverse, type for type.

    >>> decode(encode({"milestones": Counter({30: 1}), "lrs": (0.1, 0.2)}))
    {'milestones': Counter({30: 1}), 'lrs': (0.1, 0.2)}
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [encode(one) for one in value]
    if kind is dict and all(type(key) is str and key != _KIND for key in value):
        return {key: encode(one) for key, one in value.items()}
    if kind in _CONTAINERS.values():
        content = map(list, value.items()) if issubclass(kind, dict) else value
        return {_KIND: kind.__name__, _VALUE: encode([*content])}
    if kind is bytes:
        return {_KIND: "bytes", _VALUE: base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        return {_KIND: "tensor", _VALUE: [dtype_name(value.dtype), list(value.shape), _bytes_of(value)]}
    if kind.__module__ == "numpy":
        return _encode_numpy(value)
    raise RunError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be saved; expected numbers, texts, tensors, and lists, tuples, sets "
        "and dictionaries of them. Let the state_dict() of the object that has it leave it out"
    )


def _encode_numpy(value: object) -> object:
    import numpy as np

    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise RunError(f"a numpy array of {array.dtype} cannot be saved; expected numbers")
    kind = "numpy" if isinstance(value, np.ndarray) else "numpy scalar"
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {_KIND: kind, _VALUE: [array.dtype.str, list(array.shape), data]}


def decode(value: object) -> Value:
    """What `encode` was given."""
    if isinstance(value, list):
        return [decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: decode(one) for key, one in value.items()}
    kind: Value = value[_KIND]
    content: Value = value.get(_VALUE)
    try:
        if kind in _CONTAINERS:
            made, inner = _CONTAINERS[kind], [decode(one) for one in content]
            return made(dict(inner)) if issubclass(made, dict) else made(inner)
        if kind == "bytes":
            return base64.b64decode(content, validate=True)
        if kind in ("tensor", "numpy", "numpy scalar"):
            return _array(kind, *content)
    except (TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        raise RunError(f"a saved {kind} cannot be read: {error}") from error
    raise RunError(f"a saved value is of the kind {kind!r}, which this penstock does not know")


def _array(kind: str, dtype: str, shape: list[int], data: str) -> object:
    raw = bytearray(base64.b64decode(data, validate=True))
    if kind == "tensor":
        made = torch.empty(0, dtype=dtype_named(dtype)) if not raw else torch.frombuffer(raw, dtype=dtype_named(dtype))
        return made.reshape(shape)
    import numpy as np

    array = np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape)
    return array if kind == "numpy" else array[()]


def _bytes_of(tensor: torch.Tensor) -> str:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
    return base64.b64encode(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"").decode()
