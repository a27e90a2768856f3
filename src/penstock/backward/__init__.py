"""Backward of a stage.

compiled   compile_stage (`compile=`, and compiled parts in a step), split_backend, partition_backward, compile_ahead
"""
