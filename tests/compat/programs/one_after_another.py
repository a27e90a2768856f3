"""Several programs in one process, each as if it were alone: `one_after_another.py folder program port [program port]...`."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    folder, *rest = sys.argv[1:]
    for program, port in zip(rest[::2], rest[1::2], strict=True):
        os.environ["MASTER_PORT"] = port
        (mine := Path(folder) / program).mkdir(exist_ok=True)
        sys.argv = [f"{program}.py", str(mine)]
        runpy.run_path(str(Path(__file__).parent / f"{program}.py"), run_name="__main__")


if __name__ == "__main__":
    main()
