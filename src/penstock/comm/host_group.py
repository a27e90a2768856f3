"""A process group's side in host memory: for small things that processes tell one another without asking their devices.

host_group(mesh.get_group()).sum(flags)        # all processes of the group; the tensor is in host memory
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comm.distributed import backend_in_host_memory, group_timeout, place_of_group


class HostGroup:
    """The processes of a group, over its own backend for host memory; or, if it has none, a gloo that is made beside it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        has_one = torch.device("cpu") in group._device_types
        place, bound = place_of_group(group, "host"), group_timeout(group)
        self._beside: Any = None if has_one else backend_in_host_memory(group, place, bound)

    def sum(self, tensor: Tensor) -> None:
        """Make the tensor the sum over all processes. The wait has the bound of the group."""
        if self._beside is None:
            dist.all_reduce(tensor, group=self._group())
        else:
            self._beside.allreduce([tensor]).wait()


def host_group(group: dist.ProcessGroup) -> HostGroup:
    """The one of this group. All processes of the group come here together the first time."""
    if group not in _OF_GROUP:
        _OF_GROUP[group] = HostGroup(group)
    return _OF_GROUP[group]


_OF_GROUP: weakref.WeakKeyDictionary[dist.ProcessGroup, HostGroup] = weakref.WeakKeyDictionary()
