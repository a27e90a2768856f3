"""Programs that know only torch.distributed.pipelining run on penstock, and give the numbers that they give on torch."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
import penstock.compat

PROGRAMS = Path(__file__).parent / "programs"

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


def test_classes_are_the_same_wherever_they_come_from() -> None:
    assert penstock.compat.PipelineStage is penstock.PipelineStage
    assert penstock.compat.Schedule1F1B is penstock.Schedule1F1B
    from penstock.compat import schedules

    assert issubclass(penstock.ScheduleDualPipeV, schedules._PipelineScheduleRuntime)
    assert issubclass(penstock.ScheduleGPipe, schedules.PipelineScheduleSingle)


def run_two_ranks(program: str, tmp_path: Path, *, compat: bool) -> list[str]:
    """The lines that the ranks write, in order of rank."""
    command = [sys.executable, "-W", "ignore", *(["-m", "penstock.compat"] if compat else []), str(PROGRAMS / program)]
    store = tmp_path / ("ours" if compat else "theirs")
    children = [
        subprocess.Popen(
            [*command, str(store), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    lines = []
    for child in children:
        out, err = child.communicate(timeout=100)
        assert child.returncode == 0, err
        lines += out.splitlines()
    return lines


@pytest.mark.processes
@pytest.mark.parametrize("program", ["manual.py", "by_name.py"])
def test_programs_give_the_numbers_that_they_give_on_torch(program: str, tmp_path: Path) -> None:
    theirs = run_two_ranks(program, tmp_path, compat=False)
    ours = run_two_ranks(program, tmp_path, compat=True)
    assert any("penstock" in line for line in ours)
    assert not any("penstock" in line for line in theirs)
    numbers = [[float(word) for line in lines for word in line.split()[1:]] for lines in (theirs, ours)]
    assert len(numbers[0]) > 2
    assert numbers[1] == pytest.approx(numbers[0], rel=1e-5)
