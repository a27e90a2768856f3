"""The environment that Slurm's srun gives to a task, as that which torchrun gives to a rank."""

from __future__ import annotations

import re
from collections.abc import MutableMapping

STOPPED = 143  # the exit code of a task that SIGTERM has stopped with a checkpoint: the job can be queued again
_NEEDED = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID")


def enter_slurm(environment: MutableMapping[str, str]) -> bool:
    """Say in torch's names what srun has said in its own; whether this process is a task of srun's.

    >>> given = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7"}
    >>> given |= {"SLURM_STEP_NODELIST": "gpu[03-04]"}
    >>> enter_slurm(given)
    True
    >>> given["RANK"], given["WORLD_SIZE"], given["MASTER_ADDR"], given["MASTER_PORT"]
    ('5', '8', 'gpu03', '20007')
    """
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if "RANK" in environment or hosts is None or not all(name in environment for name in _NEEDED):
        return False
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
    environment["WORLD_SIZE"] = environment["SLURM_NTASKS"]
    environment.setdefault("MASTER_ADDR", first_host(hosts))
    environment.setdefault("MASTER_PORT", str(20_000 + int(environment["SLURM_JOB_ID"]) % 10_000))
    return True


def first_host(listed: str) -> str:
    """
    >>> first_host("node7"), first_host("gpu[003-017,20],login"), first_host("rack[2,4]-a"), first_host("r[1-2]n[07-09]")
    ('node7', 'gpu003', 'rack2-a', 'r1n07')
    """
    found = re.match(r"(?:[^,\[]|\[[^\]]*\])+", listed)
    if found is None:
        raise ValueError(f"{listed!r} names no host; expected what Slurm puts into SLURM_STEP_NODELIST")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", found[0])
