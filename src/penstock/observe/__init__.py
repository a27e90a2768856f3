"""Observers of a step: what a rank measures of its own actions. They are local and send nothing in a step.

observer      StepObserver, the base class, and StepView, what it sees of a step
recording     the times of all actions
live_memory   the bytes that live after each action
garbage       Python's garbage collected at the same step on all ranks
action_hooks  profiler ranges; a wait for the device after each action (PENSTOCK_BLOCKING)
"""
