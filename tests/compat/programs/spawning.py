"""A program that spawns its ranks, and starts an interpreter: which package do they see?"""

from __future__ import annotations

import subprocess
import sys

import torch.multiprocessing

CODE = "import torch.distributed.pipelining as p; print(p.__name__, flush=True)"


def say(rank: int) -> None:
    import torch.distributed.pipelining

    print(torch.distributed.pipelining.__name__, flush=True)


if __name__ == "__main__":
    say(0)
    torch.multiprocessing.spawn(say, nprocs=1)
    subprocess.run([sys.executable, "-c", CODE], check=True)
