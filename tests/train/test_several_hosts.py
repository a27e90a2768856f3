"""Two hosts, as near as one machine gets: two network namespaces with a cable between them, a torchrun in each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.xdist_group("own")]


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str, str]]]:
    """(namespace, interface, address) of two hosts that see each other and nothing else."""
    ip = shutil.which("ip")
    if ip is None:
        pytest.skip("no `ip` on this machine: network namespaces cannot be made")
    if os.geteuid() != 0:
        pytest.skip("not root: network namespaces cannot be made")
    names = [(f"penstock-{os.getpid()}-{i}", f"ps{os.getpid() % 100_000}-{i}", f"10.213.7.{i + 1}") for i in range(2)]

    def do(*words: str) -> None:
        done = subprocess.run([ip, *words], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"ip {' '.join(words)}: {done.stderr.strip()}")

    try:
        for space, _, _ in names:
            do("netns", "add", space)
        do("link", "add", names[0][1], "type", "veth", "peer", "name", names[1][1])
        for space, card, address in names:
            do("link", "set", card, "netns", space)
            do("-n", space, "addr", "add", f"{address}/24", "dev", card)
            do("-n", space, "link", "set", "lo", "up")
            do("-n", space, "link", "set", card, "up")
        yield names
    finally:
        for space, _, _ in names:
            subprocess.run([ip, "netns", "del", space], capture_output=True)


@pytest.mark.long("torchrun on one host")
def test_a_run_over_two_hosts(hosts: list[tuple[str, str, str]], tmp_path: Path) -> None:
    sizes = (
        *("--size", "tiny", "--steps", "4", "--batch", "8", "--microbatches", "4"),
        *("--no-measure", "--schedule", "1f1b", "--sample", "0", "-o", "run"),
    )
    running = []
    for number, (space, card, address) in enumerate(hosts):
        launcher = [
            *("torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"{hosts[0][2]}:29500", "--rdzv-conf", f"is_host={1 - number}", "--rdzv-id", "test"),
            *("--local-addr", address, "-m", "penstock", "train", *sizes),
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": card}
        running.append(
            subprocess.Popen(
                ["ip", "netns", "exec", space, sys.executable, "-m", *launcher],
                cwd=tmp_path,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=180)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(outputs)
    assert "pipelined == unpipelined over 3 steps" in "\n".join(outputs)
    log = [json.loads(line)["loss"] for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert len(log) == 4
    assert log[-1] < log[0]
