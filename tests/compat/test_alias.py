"""The modules of torch.distributed.pipelining, name by name."""

from __future__ import annotations

import importlib

import pytest
import torch

import penstock
import penstock.compat

NAMES = {
    "": "Pipe SplitPoint pipe_split pipeline PipelineStage build_stage ScheduleGPipe Schedule1F1B ScheduleLoopedBFS "
    "ScheduleInterleaved1F1B ScheduleInterleavedZeroBubble ScheduleZBVZeroBubble ScheduleDualPipeV _ScheduleForwardOnly",
    "schedules": "_Action _ComputationType _PipelineSchedule PipelineScheduleSingle PipelineScheduleMulti "
    "_PipelineScheduleRuntime get_schedule_class _add_send_recv _add_unshard_reshard _add_reduce_grad _merge_bw "
    "_defer_recv_ops _validate_schedule _simulate_comms_compute _format_pipeline_order _dump_chrometrace _batch_p2p "
    "_sorted_batch_p2p _wait_batch_p2p _PipelineContext _CustomFunctionProtocol _TARGET_CHUNK_SPEC _get_1f1b_rank_ops "
    "_get_warmup_ops _get_profiler_function_name F B I W FORWARD FULL_BACKWARD BACKWARD_INPUT BACKWARD_WEIGHT "
    "OVERLAP_F_B SEND_F RECV_F SEND_B RECV_B UNSHARD RESHARD REDUCE_GRAD dist",
    "stage": "_PipelineStageBase _PipelineStage PipelineStage build_stage _RecvInfo _RootArgPlaceholder "
    "_make_tensor_from_meta _normalize_model_output_as_tuple",
    "microbatch": "TensorChunkSpec _Replicate _CustomReducer sum_reducer split_args_kwargs_into_chunks merge_chunks "
    "_split_tensor _split_block_mask",
    "_IR": "Pipe PipeSequential LossWrapper TrivialLossWrapper MultiUseParameterConfig SplitPoint PipeSplitWrapper "
    "annotate_split_points pipe_split pipeline _move_placeholders_to_front",
    "_backward": "stage_backward stage_backward_input stage_backward_weight",
    "_utils": "InferenceMode PipeliningMetadataError _TensorMeta _DTensorMeta _MeshCache _StageMeta _derive_grad_metas "
    "extract_tensor_metas validate_metadata validate_tensors_metadata validate_and_normalize_to_tuple "
    "validate_static_arg_grad_correspondence to_local_if_dtensor generate_stage_to_rank_mapping "
    "generate_rank_to_stage_mapping flatten_args PipeInfo",
    "_unflatten": "_outline_submodules",
    "_schedule_visualizer": "get_schedule_ops visualize_schedule",
    "_debug": "",
}


@pytest.mark.parametrize("module", NAMES)
def test_every_name_is_there(module: str) -> None:
    found = importlib.import_module("penstock.compat" + (f".{module}" if module else ""))
    missing = [name for name in NAMES[module].split() if not hasattr(found, name)]
    assert missing == []


def test_classes_derive_from_those_of_penstock_and_as_torchs_do() -> None:
    from penstock.compat import schedules, stage

    assert issubclass(penstock.compat.PipelineStage, penstock.PipelineStage)
    assert issubclass(stage._PipelineStage, stage.PipelineStage)
    for name in ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV", "ZBH1", "VHalf"):
        kind = schedules.get_schedule_class(name)
        assert issubclass(kind, getattr(penstock, f"Schedule{name}"))
        assert issubclass(kind, schedules._PipelineSchedule)
    assert issubclass(schedules.ScheduleDualPipeV, schedules._PipelineScheduleRuntime)
    assert issubclass(schedules.ScheduleGPipe, schedules.PipelineScheduleSingle)
    assert issubclass(schedules._PipelineScheduleRuntime, penstock.PipelineScheduleMulti)


def test_spacing_puts_every_action_after_what_it_needs() -> None:
    from penstock.compat._schedule_visualizer import get_schedule_ops

    first, second = get_schedule_ops("Interleaved1F1B", 2, 2, add_spacing=True)
    assert [str(action) for action in second[:4]] == ["None", "1F0", "1F1", "3F0"]
    assert [str(action) for action in second[4:8]] == ["3B0", "None", "3F1", "3B1"]  # a full backward takes two slots
    assert first.index(*[a for a in first if str(a) == "2B0"]) == 6
    assert [str(a) for a in first if a] == [str(a) for a in get_schedule_ops("Interleaved1F1B", 2, 2)[0]]


def test_helpers_take_the_keywords_of_torch() -> None:
    from penstock.compat import _IR, _utils, microbatch, schedules

    order = {rank: [schedules._Action.from_str(f"{rank}{kind}0") for kind in "FB"] for rank in range(2)}
    placed = schedules._validate_schedule(actions=order, pp_group_size=2, num_stages=2, num_microbatches=1)
    assert placed == {0: 0, 1: 1}
    chunks = microbatch._split_tensor(torch.arange(4), microbatch.TensorChunkSpec(0), num_chunks=2)
    assert [chunk.tolist() for chunk in chunks] == [[0, 1], [2, 3]]
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    _IR.annotate_split_points(mod=model, spec={"1": _IR.SplitPoint.BEGINNING})
    pipe = _IR.pipeline(model, (torch.ones(1, 2),))
    assert pipe.num_stages == 2
    assert pipe.split_gm.submod_pp_1 is pipe.get_stage_module(1)
    assert not pipe.has_loss_and_backward
    meta = _utils._TensorMeta(torch.Size([2]), (1,), torch.float32, requires_grad=True)
    assert _utils._derive_grad_metas(tensor_metas=(meta,))[0] is not None
    spread = _utils._DTensorMeta(torch.Size([2]), (1,), torch.float32, requires_grad=True)
    assert spread.placements == ()


def test_names_are_found_where_torch_imports_them_too() -> None:
    from penstock.compat import _IR, _backward, _utils, microbatch, schedules, stage

    assert stage.flatten_args is _utils.flatten_args  # type: ignore[attr-defined]
    assert stage.stage_backward is _backward.stage_backward  # type: ignore[attr-defined]
    assert schedules.merge_chunks is microbatch.merge_chunks  # type: ignore[attr-defined]
    assert _IR._PipelineStage is stage._PipelineStage  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'unheard_of'"):
        _ = stage.unheard_of  # type: ignore[attr-defined]
