"""The keyword options of `Pipeline` with their types and descriptions, for editors and type checkers.

`penstock.front.pipeline_options` has their defaults and checks their values; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.balance import Profile
from penstock.batch.group_rows import GroupRows
from penstock.checkpoint.weight_files import Source
from penstock.front.dimensions import Parallelize
from penstock.lower import ReceivePolicy
from penstock.nest import Value
from penstock.plan import Placement
from penstock.run.planning import Place, Sparing
from penstock.run.ties import Holders, Tied
from penstock.stage.compile_options import CompileOptions
from penstock.stage.pipeline_stage import Group, PipelineStage

Bytes = int | float | str
"""A number of bytes, or text with a unit: 6_000_000_000, "6GB", "6GiB"."""


class PipelineOptions(TypedDict, total=False):
    """Keyword options of `Pipeline`."""

    example_kwargs: Mapping[str, Value] | None
    """Keyword arguments of the example batch."""
    example_target: Value
    """Target of the example batch; with it the profile includes the loss."""
    weights: Source | None
    """Initial values: a state dict, safetensors, .pt or .bin files, a folder of them, or a torch checkpoint."""
    init: Callable[[str, Tensor], None] | None
    """Called as init(name, tensor) for each tensor on the meta device that `weights` does not have."""

    stages: int | Sequence[PipelineStage] | None
    """Number of stages over all ranks, or the `PipelineStage`s of this rank."""
    num_stages: int | None
    """Number of stages over all ranks."""
    placement: Placement | Literal["loop", "v"] | None
    """Assignment of stages to ranks. Default: that of the schedule."""
    memory_limit: Bytes | Sequence[Bytes] | None
    """Memory of a rank, or a list with that of each rank. Stages are recomputed or offloaded to stay below it."""
    optimizer_bytes: float
    """Bytes of optimizer state per byte of parameters, for `memory_limit`: 2 for Adam, 0 for SGD."""
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None
    """Function that makes the optimizer; the size of its state is measured instead of `optimizer_bytes`."""
    profile: Profile | str | Path | Literal[False] | None
    """Measured costs of the layers, or their file. None measures them; False cuts by size."""
    split_spec: Mapping[str, object] | None
    """Where to cut: {name of a module: SplitPoint}."""
    split_policy: Callable[..., object] | None
    """Function of the captured module that marks where to cut."""
    dynamic_shapes: Mapping[str, object] | None
    """Sizes that may change, as torch.export takes them."""
    output_loss_value_spec: object
    """Which output of the model is its loss."""
    multi_use_param_spec: object
    """What to do with parameters that several stages use."""
    compile: CompileOptions
    """True, or a dictionary of options of torch.compile: compile each stage in place."""

    group: Group
    """Process group of the pipeline, or a transport of `LocalWorld`. Default: all processes."""
    mesh: DeviceMesh | None
    """Device mesh with the dimensions "dp" and "pp", and those that `parallelize` uses."""
    parallelize: Parallelize | None
    """Called as parallelize(module, mesh) for the module of each stage, to shard it over further dimensions."""
    data_parallel: Literal["ddp", "fsdp"]
    """How the replicas of `mesh` are kept in step."""
    device: torch.device | str | None
    """Device of the stages of this rank. Default: that of the model's parameters."""

    loss_scale: torch.amp.GradScaler | None
    """Gradient scaler. All ranks skip an optimizer step if gradients overflow on one of them."""
    loss_weight: Callable[..., Value] | None
    """Called as loss_weight(target); returns the weight of a microbatch in the loss. Default: by its loss, or its rows."""
    run_folder: str | Path | None
    """Folder for the status file of each rank, which `penstock top` reads."""
    collect_every: int | None
    """Run Python's garbage collector every so many steps, on all ranks in the same step, and at no other time."""
    share_loss: bool
    """False: no broadcast at the end of a step; only the rank of the last stage knows the loss."""
    few_rows: bool
    """True: split a batch with fewer rows than microbatches into fewer microbatches. Every rank passes the batch."""
    group_rows: GroupRows | Callable[..., Sequence[int] | Tensor] | None
    """Function of the arguments of a step that returns the length of each row: microbatches then have similar costs."""
    replan: float | None
    """Change to another plan if measurements predict that it saves this fraction of a step."""
    scale_grads: bool
    """True: weigh microbatches so that losses and gradients are those of the batch. False: add them up."""
    seed: int
    """Seed of `rng`."""
    rng: Literal["per-microbatch"] | None
    """"per-microbatch": random numbers depend on seed, stage, microbatch and step, not on schedule and placement."""
    recompute: Sparing
    """Stages with activation recompute: True, a list of stages, or {stage: [microbatches]}."""
    offload: Sparing
    """Stages whose activations are offloaded: True, a list of stages, or {stage: [microbatches]}."""
    offload_to: Place
    """Folder to offload to. Default: host memory."""
    ties: Iterable[Tied | Holders]
    """Parameters that stages share, for stages made by hand."""
    dynamic: bool
    """True: shapes between stages may change from step to step even if those of the input do not."""
    receives: ReceivePolicy | None
    """When receives are posted: a policy of `penstock.lower`."""
    args_chunk_spec: object
    """How to split the positional arguments of a batch."""
    kwargs_chunk_spec: object
    """How to split the keyword arguments of a batch."""
    target_chunk_spec: object
    """How to split the target of a batch."""
    output_merge_spec: object
    """How to merge the outputs of the microbatches."""
