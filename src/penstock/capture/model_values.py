"""What a model takes and returns, as capture sees it: tensors, traced sizes, and what holds them.

leaves, recipe = model_values.flatten(output, "the output")
model_values.unflatten(recipe, others)
"""

from __future__ import annotations

import torch

from penstock.errors import CaptureError
from penstock.nest import Kind, Nest, Nesting, Node, Trail, has_tensor, open_node, open_object, spelled


class _ModelValues(Nesting):
    """Sees tensors and traced sizes, also in the attributes of objects that nobody registered, such as caches."""

    leaf_types = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)

    def opened(self, value: object) -> Node | None:
        node = open_node(value)
        if node is not None and node.kind not in (Kind.DATACLASS, Kind.COPY):
            return node
        return None if callable(value) or isinstance(value, dict | list | tuple) else open_object(value)

    def constant(self, value: object, trail: Trail) -> Nest:
        if isinstance(value, dict | list | tuple) and has_tensor(value):
            raise CaptureError(
                f"{spelled(trail)} is a {type(value).__qualname__} with tensors in it, and nothing says how to make another "
                "one: give a plain dict, list or tuple, or register it with torch.utils._pytree.register_pytree_node"
            )
        return Nest(Kind.CONSTANT, value)


model_values = _ModelValues()
