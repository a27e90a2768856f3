"""A case as a stand-alone script: its model, the loop, the pipeline and the comparison in one file that needs penstock alone.

Path("found.py").write_text(script(case, "gradient of blocks.0.linear.weight is off by 0.3"))
"""

from __future__ import annotations

import ast
from pathlib import Path

from tests.fuzz.cases import Case

FILES = (
    "blocks.py",
    "blocks_state.py",
    "cases.py",
    "models.py",
    "oracle.py",
    "ranks.py",
    "compare.py",
    "verdict.py",
)
HEAD = '''"""{title}

Run it with: python {name}
Written by tests/fuzz. The case is at the end, in one line; `Model` and `Batch` make of it what is trained, `Oracle` is the
plain loop, `Rank` is what a rank does with penstock.
"""

from __future__ import annotations
'''
THREADS = """
verdict = run_threads(Case.loads(CASE))
print(verdict.kind, verdict.reason)
print(verdict.details)
raise SystemExit(verdict.is_finding)
"""
PROCESSES = """
if __name__ == "__main__":
    verdict = in_new_processes(Case.loads(CASE))
    print(verdict.kind, verdict.reason)
    print(verdict.details)
    raise SystemExit(verdict.is_finding)
"""


def script(case: Case, title: str, *, name: str = "script.py") -> str:
    """The text of a program that runs the case and ends with 1 if it still fails."""
    folder = Path(__file__).parent
    files = (*FILES, *(("mesh_ranks.py", "run_processes.py") if case.mesh else ("run_threads.py",)))
    imports: dict[str, None] = {}
    bodies = []
    for file in files:
        text = (folder / file).read_text()
        bodies.append(_body(text, imports, set(case.blocks)))
    head = HEAD.format(title=title.strip().replace('"""', "'''"), name=name)
    case_text = f"CASE = r'''{case.dumps()}'''\n"
    main = PROCESSES if case.mesh else THREADS
    return "\n".join([head, *imports, *bodies, case_text, main])


def _body(text: str, imports: dict[str, None], kinds: set[str]) -> str:
    """A file without its imports, which are gathered, and without kinds of blocks that the case does not have."""
    lines = text.splitlines()
    kept: list[str] = []
    for node in ast.parse(text).body:
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
        source = "\n".join(lines[first - 1 : node.end_lineno])
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            if not module.startswith(("tests", "__future__")):
                imports[ast.unparse(node)] = None
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # the docstring of the file
        elif isinstance(node, ast.ClassDef) and _is_kind(node) and node.name.lower() not in kinds:
            continue
        else:
            kept.append(source + "\n")
    return "\n\n".join(kept)


def _is_kind(node: ast.ClassDef) -> bool:
    return any(isinstance(one, ast.Call) and getattr(one.func, "id", "") == "block" for one in node.decorator_list)
