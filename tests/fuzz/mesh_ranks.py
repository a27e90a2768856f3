"""A rank of a mesh: stages made by hand or captured, wrapped by Pipeline or by hand, tensor parallel or not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import penstock
from tests.fuzz.cases import Case
from tests.fuzz.models import LOSSES, Part, make_model, make_part, ties_of
from tests.fuzz.oracle import Left
from tests.fuzz.ranks import Rank, plan_of

# Along which dimension weights are cut, of blocks as they are named in a captured model; the rest is on all ranks.
SHARDED = {
    "*.up.weight": 0,
    "*.up.bias": 0,
    "*.down.weight": 1,
    "*.table.weight": 1,
    "*.linear.weight": 0,
}
BY_HAND = ("replicate", "replicate_with_fsdp", "hsdp", "fsdp_mixed")  # what Pipeline does not wrap by itself


def wrapped(module: nn.Module, mesh: Any, kind: str) -> nn.Module:
    """The module of a stage, wrapped as users do it by hand."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if kind == "replicate" and not any(parameter.requires_grad for parameter in module.parameters()):
        return module  # which it would refuse
    if kind == "replicate":
        from torch.distributed._composable.replicate import replicate

        return replicate(module, process_group=mesh["dp"].get_group())
    if kind == "replicate_with_fsdp":
        from torch.distributed._composable.replicate_with_fsdp import replicate as with_fsdp

        return with_fsdp(module, mesh=mesh["dp"])
    if kind == "hsdp":
        two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return fully_shard(module, mesh=two)
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    return fully_shard(module, mesh=mesh["dp"], mp_policy=policy)


def parallelize_tied(module: nn.Module, mesh: Any) -> nn.Module | None:
    """As `parallelize`, with linear weights cut along the dimension of tables, which may be tied to them."""
    return parallelize(module, mesh, {**SHARDED, "*.linear.weight": 1})


def parallelize(module: nn.Module, mesh: Any, sharded: Mapping[str, int] = SHARDED) -> nn.Module | None:
    """Parameters of a captured stage by their names; layers of one made by hand as torch does it."""
    if not isinstance(module, Part):
        penstock.shard_parameters(module, mesh["tp"], dict(sharded))
        return None
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles: dict[str, Any] = {}
    for name, layer in module.named_modules():
        last = name.rpartition(".")[2]
        if last == "up":
            styles[name] = ColwiseParallel()
        elif last == "down":
            styles[name] = RowwiseParallel()
        elif last == "linear":
            styles[name] = ColwiseParallel(output_layouts=Replicate())
        elif isinstance(layer, nn.Embedding):
            styles[name] = RowwiseParallel(input_layouts=Replicate())
    return parallelize_module(module, mesh["tp"], styles)


class MeshRank(Rank):
    """A rank whose place is in a mesh with the dimensions dp, pp and tp."""

    def __init__(self, case: Case, *, mesh: Any, folder: Path) -> None:
        super().__init__(case, group=mesh["pp"].get_group(), folder=folder, mesh=mesh, rank=mesh["pp"].get_local_rank())

    def make(self, case: Case, options: dict[str, Any]) -> penstock.Pipeline:
        kind, tp = case.mesh["kind"], int(case.mesh.get("tp", 1))
        names = (*(("dp",) if case.replicas > 1 else ()), "pp", *(("tp",) if tp > 1 else ()))
        self.pipe_mesh = self.mesh[names] if len(names) > 1 else self.mesh["pp"]
        if kind in ("ddp", "fsdp"):
            options["data_parallel"] = kind
        if tp > 1:
            options["parallelize"] = parallelize_tied if case.ties else parallelize
        if kind in BY_HAND:
            return self.made_by_hand(case, options, wrap=kind)
        if not case.captured:
            return self.made_by_hand(case, {**options, "mesh": self.pipe_mesh})
        mesh, self.mesh = self.mesh, self.pipe_mesh
        try:
            return self.capture(case, options)
        finally:
            self.mesh = mesh

    def made_by_hand(self, case: Case, options: dict[str, Any], *, wrap: str = "") -> penstock.Pipeline:
        plan, model = plan_of(case), make_model(case)
        parts = {k: make_part(model, case, k) for k in plan.placement.stages_of(self.rank)}
        modules = {k: wrapped(part, self.mesh, wrap) if wrap else part for k, part in parts.items()}
        stages = [
            penstock.PipelineStage(module, k, case.num_stages, "cpu", group=self.group) for k, module in modules.items()
        ]
        ties = [penstock.tie(holders) for holders in ties_of(case)]
        return penstock.Pipeline(stages=stages, schedule=plan, loss_fn=LOSSES[case.loss], ties=ties, **options)

    def call(self, left: Left, action: Any, number: int) -> None:
        super().call(left, action, number)
        left.outputs = None  # each replica has its own rows
        if self.case.mesh["kind"] in BY_HAND or not self.case.options.get("share_loss", True):
            left.loss = None  # which is that of one replica: Pipeline does not know of the others, or does not ask them

    def act(self, number: int, action: Any) -> Left:
        left = super().act(number, action)
        if action["do"] == "unsynced":
            left.grads = {}  # of this replica alone until the next step
        return left
