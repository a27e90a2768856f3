"""Every program in examples/ runs, with small sizes, in real processes, and prints what it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

from tests.examples.beside import installed_beside
from tests.gloo_pool import GlooPool, as_torchrun, free_port

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]


@dataclass(frozen=True)
class Example:
    name: str
    arguments: str  # {tmp} is a folder of the test
    prints: str  # a pattern
    ranks: int = 2


EXAMPLES = [
    Example(
        "gpt",
        "--steps 3 --layers 2 --width 32 --length 16 --rows 8 --schedule 1f1b --checkpoint {tmp}/gpt",
        r"step 0: loss 5\.\d+, gradient norm .*\n.*step 2: loss .*\ndef ",
    ),
    Example("own_schedule", "--steps 3", r"rank 1 │·  F0 B0 .*bubble 50%, most microbatches held 1\n.*step 2: loss 1"),
    Example("own_plan", "--steps 3 --file {tmp}/plan.csv", r"step 2: loss"),
    Example(
        "checkpoint_surgery", "--steps 3 --checkpoint {tmp}/kept", r"at loss (\S+), continued with two stages at \1\n"
    ),
    Example("evaluate", "--rows 35", r"accuracy .* over 35 rows\nthe same as the model in one piece"),
    Example(
        "large_vocabulary",
        "--steps 2 --vocabulary 2000 --width 16 --length 32 --rows 8 --slice 16",
        r"all logits at once: .*16 tokens at a time: .*\nthe losses are the same",
    ),
    Example("data_parallel", "--epochs 2 --width 16", r"epoch 0: loss .*\nepoch 1: loss", ranks=4),
    Example("fsdp", "--steps 2 --width 16", r"step 1: loss .*\nof 2,074 numbers the ranks keep", ranks=4),
    Example("tensor_parallel", "--steps 2 --width 8", r"the gradients are those of the model in one piece", ranks=4),
    Example("lora", "--steps 3 --width 32 --output {tmp}/lora", r"step 2: loss .*the adapter loaded by peft: \d"),
    Example("lightning_module", "--epochs 2 --checkpoint {tmp}/kept", r"loss 0\.\d+, validation 0\.\d+"),
]


def run_main(name: str, arguments: list[str], port: int) -> str:
    """The program's `main`, as torchrun would call it; what it printed."""
    with as_torchrun(port) as printed:
        import_module(f"examples.{name}").main(arguments)
    return printed.getvalue()


@pytest.mark.parametrize("example", [pytest.param(example, id=example.name) for example in EXAMPLES])
def test_the_example_runs(example: Example, gloo_pool: GlooPool, tmp_path: Path) -> None:
    arguments = example.arguments.format(tmp=tmp_path).split()
    printed = "\n".join(gloo_pool.run(example.ranks, run_main, example.name, arguments, free_port(), timeout=100.0))
    assert re.search(example.prints, printed, re.DOTALL), printed


@pytest.mark.long(
    "tests/compat/test_programs.py: torchtitan and triton take 1.1 GB; `make test ARGS=--long` installs them"
)
def test_torchtitan(tmp_path: Path) -> None:
    """In processes of its own: penstock.compat stands in for a package of torch's there."""
    others = installed_beside("torchtitan")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "examples" / "torchtitan_llama.py"), "--steps", "3", "--layers", "4", "--length", "16"]
    path = os.pathsep.join([str(ROOT / "src"), others, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(found) for found in re.findall(r"step \d: loss (\S+) by penstock", done.stdout)]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]


def test_every_example_is_here_and_says_how_to_run_it() -> None:
    files = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")}
    assert set(files) == {example.name for example in EXAMPLES} | {"torchtitan_llama"}
    for name, text in files.items():
        assert f"examples/{name}.py" in text.split('"""')[1], f"examples/{name}.py does not say how it is started"
