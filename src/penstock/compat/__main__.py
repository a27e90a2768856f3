"""`python -m penstock.compat program.py args...`: run a program written for torch.distributed.pipelining, unchanged.

`-m module args...` runs a module instead of a file, as Python itself does.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from penstock.compat._alias import install


def main() -> None:
    as_module = sys.argv[1:2] == ["-m"]
    arguments = sys.argv[2:] if as_module else sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        raise SystemExit("usage: python -m penstock.compat [-m module | program.py] [arguments ...]")
    install()
    sys.argv = arguments
    if as_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
