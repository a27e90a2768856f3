"""`torch.distributed.pipelining._unflatten`."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import fx, nn
from torch.export.unflatten import _ModuleFrame

from penstock.compat._siblings import found_in
from penstock.nest import Value

__getattr__ = found_in(__name__)


def _outline_submodules(orig_graph: fx.Graph) -> fx.GraphModule:
    """Put the calls of an exported graph back into the modules that they came from, in their order."""
    frame: Any = _ModuleFrame
    outlined = fx.GraphModule(nn.Module(), fx.Graph())
    registry: tuple[Value, ...] = ({}, defaultdict(list), defaultdict(set), {})  # nodes, modules, attributes, made ones
    frame(orig_graph, tuple(orig_graph.nodes), *registry, None, [("", None, 0)], "", {}, module=outlined).run_outer()
    outlined.graph.lint()
    outlined.recompile()
    return outlined
