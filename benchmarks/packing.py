"""Several tensors to one rank, each as a message, or put together into one: microseconds of the processor, both ends together.

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/packing.py

Two processes, penstock's transport (lines up to 128 KB, gloo above), `count` tensors of `size` bytes. Together: the sender joins
their bytes, each part at a multiple of 64 (kernels expect that of memory that was made for a tensor), and the receiver makes a
tensor of each part. Times are of the processor, medians of rounds that alternate; `ratio` is together / alone.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from penstock.comm import DistributedTransport, Transport

TIMES = 300
ALIGNED = 64

Exchange = Callable[[Transport, list[Tensor]], list[Tensor]]


def alone(transport: Transport, tensors: list[Tensor]) -> list[Tensor]:
    if transport.rank == 0:
        send, wait = transport.sender(1), transport.waiter()
        for work in [send([tensor]) for tensor in tensors]:
            if work is not None:
                wait(work)
        return []
    receive, wait = transport.receiver(0), transport.waiter()
    found = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    for work in [receive([tensor]) for tensor in found]:
        wait(work)
    return found


def together(transport: Transport, tensors: list[Tensor]) -> list[Tensor]:
    if transport.rank == 0:
        pieces = []
        for tensor in tensors:
            data = tensor.detach().view(-1).view(torch.uint8)
            pieces.append(data)
            if data.numel() % ALIGNED:
                pieces.append(NOTHING[: -data.numel() % ALIGNED])
        work = transport.sender(1)([torch.cat(pieces)])
        if work is not None:
            transport.waiter()(work)
        return []
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    whole = torch.empty(sum(size + -size % ALIGNED for size in sizes), dtype=torch.uint8)
    transport.waiter()(transport.receiver(0)([whole]))
    found, begin = [], 0
    for tensor, size in zip(tensors, sizes, strict=True):
        # `data`: a change of one in place is none of the others
        found.append(whole[begin : begin + size].view(tensor.dtype).view(tensor.shape).data)
        begin += size + -size % ALIGNED
    return found


NOTHING = torch.zeros(ALIGNED, dtype=torch.uint8)


def measure(transport: Transport, count: int, size: int, rounds: int) -> list[float]:
    """Microseconds of one exchange: alone, together."""
    tensors = [torch.zeros(size // 8, 2) for _ in range(count)]
    times = max(10, TIMES >> (size >> 17).bit_length())
    taken: list[list[float]] = [[], []]
    for turn in range(rounds + 1):
        for exchange, found in zip((alone, together), taken, strict=True):
            transport.begin_step()
            begin = time.process_time()
            for _ in range(times):
                exchange(transport, tensors)
            if turn:
                found.append((time.process_time() - begin) / times * 1e6)
            transport.collectives.barrier("a round")
            transport.end_step()
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, taken)
    return [statistics.median(map(sum, zip(*both, strict=True))) for both in zip(*everyone, strict=True)]


def work(rank: int, port: int, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    transport = DistributedTransport.of()
    transport.collectives.all_bytes("both are there", b"")
    transport.connect([1 - rank])
    if rank == 0:
        print(f"{'count':>5} {'size':>8} {'alone':>9} {'together':>9} {'ratio':>6}")
    for count in (2, 4, 8):
        for size in (64, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20):
            each, one = measure(transport, count, size, rounds)
            if rank == 0:
                print(f"{count:5} {size:8} {each:9.1f} {one:9.1f} {one / each:6.2f}", flush=True)
    transport.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port = door.getsockname()[1]
    mp.spawn(work, (port, rounds), nprocs=2)


if __name__ == "__main__":
    main()
