"""Backward of a stage: engines, and decorators that reduce memory.

seam       engine_protocol (BackwardEngine, MicrobatchPass), engines (which engine each microbatch has)
engines    full (one engine call; weight gradients by the user), split (input and weight pass)
memory     recompute (R), module_state (put back for it), offload (O and L), offload_targets (host memory, folder)
compiled   compile_stage (`compile=`, and compiled parts in a step), split_backend, partition_backward, compile_ahead
"""
