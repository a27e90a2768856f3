"""Cut points of a model from the costs and memory of its layers. No torch.

>>> from penstock.balance import LayerCost, Profile, balance
>>> profile = Profile(layers=tuple(LayerCost(f"layers.{i}", forward=1.0, backward_input=1.0) for i in range(6)))
>>> balance(profile, 3).boundaries
(2, 4)
"""

from __future__ import annotations

from penstock.balance.balance_rows import Grouped, attention, group_rows
from penstock.balance.cuts import Cuts, StageCut
from penstock.balance.in_flight import in_flight
from penstock.balance.layer_profile import LayerCost, Profile
from penstock.balance.solve import balance, leanest, placement_ranks

__all__ = [
    "Cuts",
    "Grouped",
    "LayerCost",
    "Profile",
    "StageCut",
    "attention",
    "balance",
    "group_rows",
    "in_flight",
    "leanest",
    "placement_ranks",
]
