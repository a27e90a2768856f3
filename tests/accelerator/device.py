"""The simulated device for Python: builds the C++ files beside this one, once, and registers the device "sim".

    sim = load()                       # the extension; `torch.sim` is the device's module, "strict" the backend
    x = torch.randn(3, device="sim")
    sim.waits()                        # the reasons for which the host has waited since sim.reset()

A process that loads it has the device for the rest of its life, so tests do that in processes of their own.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

FOLDER = Path(__file__).parent / "sim"
NAME = "penstock_sim"


def why_not() -> str | None:
    """What is missing to build the device, in words; None if it can be built."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler ({compiler}): apt-get install g++"
    if shutil.which("ninja") is None:
        return "there is no ninja: apt-get install ninja-build, or pip install ninja"
    return None


def library() -> Path:
    """Where the extension of this version is, or will be."""
    texts = b"".join(path.read_bytes() for path in sorted(FOLDER.iterdir()))
    version = hashlib.sha256(texts + torch.__version__.encode() + sys.version.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"{NAME}-{os.getuid()}-{version}" / f"{NAME}.so"


def ensure_built() -> None:
    """Build the extension in a process of its own, unless it is there. Of several workers one builds, the others wait."""
    place = library()
    with place.parent.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.exists():
            return
        command = [sys.executable, "-m", "tests.accelerator.device"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
        if done.returncode:
            raise RuntimeError(
                f"the simulated device could not be built:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
            )


def build() -> None:
    from torch.utils.cpp_extension import load as compile_and_load

    folder = library().parent
    working = folder.with_name(f"{folder.name}.{os.getpid()}")
    working.mkdir(parents=True)
    compile_and_load(
        NAME, [str(FOLDER / "sim.cpp")], build_directory=str(working), extra_cflags=["-O0", "-DUSE_DISTRIBUTED"]
    )
    try:
        working.rename(folder)
    except OSError:  # another process was quicker
        shutil.rmtree(working)


@cache
def load() -> Any:
    """The extension, with its device and its backend registered."""
    from torch import _meta_registrations  # noqa: F401  the shapes of what operators give

    ensure_built()
    spec = importlib.util.spec_from_file_location(NAME, library())
    assert spec is not None, "a path of a library always has a spec"
    assert spec.loader is not None, "and a loader"
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", device_module(extension))
    torch.utils.generate_methods_for_privateuse1_backend()
    register_backend(extension)
    return extension


def device_module(extension: Any) -> ModuleType:
    """What `torch.sim` is: the calls that every device module has."""
    found: Any = ModuleType("torch.sim")

    def index_of(device: Any) -> int:
        index = device if isinstance(device, int) else None if device is None else torch.device(device).index
        return extension.current_device() if index is None else index

    generators = [extension.generator(n) for n in range(extension.device_count())]
    found.is_available = found.is_initialized = lambda: True
    found._is_in_bad_fork = lambda: False
    found.device_count, found.current_device = extension.device_count, extension.current_device
    found.set_device = lambda device: extension.set_device(index_of(device))
    found.synchronize = lambda device=None: extension.synchronize(index_of(device))
    found.current_stream = lambda device=None: torch.accelerator.current_stream(index_of(device))
    found.Stream, found.Event = torch.Stream, torch.Event
    found.stream = lambda stream: stream
    found.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    found.default_generators = generators
    found.get_rng_state = lambda device=None: generators[index_of(device)].get_state()
    found.set_rng_state = lambda state, device=None: generators[index_of(device)].set_state(state)
    found.manual_seed = lambda seed, device=None: generators[index_of(device)].manual_seed(seed)
    found.manual_seed_all = lambda seed: [each.manual_seed(seed) for each in generators]
    return found


def register_backend(extension: Any) -> None:
    """The backend "strict" for the device; `init_process_group("cpu:gloo,sim:strict")` or "strict" alone.

    Its class stands where torch has those of its own backends, so that penstock makes communicators of it by the lines by
    which it makes those of NCCL.
    """
    import torch.distributed as dist

    def create(asked: Any, given: Any) -> Any:
        options = given or extension.StrictGroup.Options()
        options._timeout = asked.timeout
        return extension.StrictGroup(asked.store, asked.group_rank, asked.group_size, options)

    dist.Backend.register_backend("strict", create, extended_api=True, devices=["sim"])
    dist.ProcessGroupSTRICT = extension.StrictGroup  # type: ignore[attr-defined]


if __name__ == "__main__":
    build()
