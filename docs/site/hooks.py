"""What mkdocs does for the site beyond turning pages into HTML: navigation, API reference, examples, links out of docs/."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from pathlib import Path
from runpy import run_path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[2]
PYODIDE = Path(sys.prefix) / "pyodide" / "node_modules" / "pyodide"  # where `make docs` puts it, if npm is there
sys.path.insert(0, str(ROOT / "src"))  # the code beside these pages, wherever another penstock is installed

GROUPS = {"start": "Start", "guides": "Guides", "concepts": "Concepts", "integrations": "Integrations"}
PACKAGES = [
    *("front", "plan", "schedules", "lower", "simulate", "show", "balance", "search", "studio"),
    *("batch", "comm", "parallel", "stage", "backward", "run", "capture", "train", "errors", "compat"),
    *("integrations.transformers", "integrations.lightning"),
]
PROJECT = {"CHANGELOG.md": "Changelog", "CONTRIBUTING.md": "Contributing", "SECURITY.md": "Security"}
PROJECT |= {"CODE_OF_CONDUCT.md": "Code of conduct"}
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
WORKER = re.compile(r'src="https://unpkg.com/iframe-worker/shim"')
CARD = re.compile(r"^- (\[[^\]]*\]\([^)]*\)):? *(.*)$", re.MULTILINE)
FENCED = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


# -- what mkdocs calls


def on_config(config: Any) -> Any:
    """The navigation: the pages in the order in which docs/index.md lists them, grouped by folder."""
    groups: dict[str, list[Any]] = {name: [] for name in GROUPS.values()}
    for _, path, _ in LINK.findall((ROOT / "docs" / "index.md").read_text(encoding="utf-8")):
        if not path.endswith(".md") or path.startswith("..") or path == "gallery.md":
            continue
        groups[GROUPS.get(path.split("/")[0], "Guides")].append(path)
    config.nav = [
        {"Home": "index.md"},
        *({name: pages} for name, pages in groups.items() if pages),
        {"Gallery": "gallery.md"},
        {"Examples": ["examples/index.md", *(f"examples/{path.stem}.md" for path in examples())]},
        {"Reference": ["reference/index.md", *({name.split(".")[-1]: f"reference/{name}.md"} for name in PACKAGES)]},
        {"Project": [{name: f"project/{file}"} for file, name in PROJECT.items()]},
    ]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Pages that are made: the reference, the examples with their source, and the files of the project."""
    made = {f"project/{file}": (ROOT / file).read_text(encoding="utf-8") for file in PROJECT}
    made["examples/index.md"] = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    made |= {f"examples/{path.stem}.md": example_page(path) for path in examples()}
    made["reference/index.md"] = names_page()
    made |= {f"reference/{name}.md": package_page(name) for name in PACKAGES}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> str:
    """Marks of the tests leave the code blocks; links to files of the repository lead to their pages here."""
    source = source_of(page.file.src_uri)
    parts, end = [], 0
    planner = ""
    if PYODIDE.is_dir():
        href = get_relative_url("studio/index.html", page.url)
        planner = f'<a class="md-button md-button--primary" href="{href}">Open the planner</a>'
    if page.file.src_uri == "guides/studio.md":
        markdown = markdown.replace("\n\n", f"\n\n{planner}\n\n", 1)
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation", "toc"]  # it is a table of contents
        markdown = home_page(markdown, planner)
    for fence in FENCED.finditer(markdown):
        parts += [linked(markdown[end : fence.start()], source, page.file.src_uri), fenced(fence)]
        end = fence.end()
    return "".join([*parts, linked(markdown[end:], source, page.file.src_uri)])


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Search without a server: the theme would fetch a stand-in for workers, which pages from a folder may not start."""
    return WORKER.sub(f'src="{get_relative_url("assets/worker.js", page.url)}"', output)


def on_post_build(config: Any) -> None:
    """The planner, with Python inside it, beside the pages."""
    from penstock.studio.static import build

    if PYODIDE.is_dir():
        build(Path(config.site_dir) / "studio", PYODIDE)


# -- pages


def examples() -> list[Path]:
    return sorted((ROOT / "examples").glob("*.py"))


def example_page(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    said = text.split('"""')[1].strip()
    rest = text.split('"""', 2)[2].strip()
    return f'# {path.stem.replace("_", " ").capitalize()}\n\n{said}\n\n```python title="{path.name}"\n{rest}\n```\n'


def home_page(markdown: str, planner: str) -> str:
    """Buttons below the first paragraph, and each page of a list as a card: its name, and below it what it is about."""
    title, said, rest = markdown.split("\n\n", 2)
    buttons = [
        "[Get started](start/get-started.md){ .md-button .md-button--primary }",
        "[Gallery](gallery.md){ .md-button }",
    ]
    buttons.append(planner.replace(" md-button--primary", ""))
    cards = CARD.sub(r"- **\1**<br>\2", rest)
    return f'<div class="home" markdown>\n\n{title}\n\n{said}\n\n{" ".join(buttons)}\n\n{cards}\n</div>\n'


def names_page() -> str:
    """Every name of `penstock`, with its first line, and where it is described."""
    import penstock

    rows = []
    for name, home in penstock._HOME.items():
        package = home.split(".")[1]
        rows.append(f"| [`{name}`]({package}.md#{home}.{name}) | {first_line(getattr(penstock, name))} |")
    head = "# Reference\n\nEvery name of `penstock` itself. The packages beneath have more, each on its page.\n\n"
    return head + "\n".join(["| name | |", "|---|---|", *sorted(rows)]) + "\n"


def package_page(package: str) -> str:
    """Everything that a package exports."""
    module = importlib.import_module(f"penstock.{package}")
    public = public_names(package)
    shown = (f"::: {identifier}\n{inherits(identifier, public)}" for identifier in public)
    return "\n".join([f"# penstock.{package}\n\n{as_prose(module.__doc__)}\n", *shown])


def inherits(identifier: str, public: list[str]) -> str:
    """With a base class of penstock's that has no entry of its own, what it inherits is shown as its own."""
    import penstock

    home, _, name = identifier.rpartition(".")
    described = {*penstock._HOME, *(other.rpartition(".")[2] for other in public)}
    bases = getattr(getattr(importlib.import_module(home), name), "__mro__", ())[1:]
    own = [base.__name__ for base in bases if base.__module__.startswith("penstock.")]
    hidden = own and own[0] not in described
    return "    options:\n      inherited_members: true\n" if hidden else ""


def public_names(package: str) -> list[str]:
    """The names of a package, as the reference shows them: its own, and those of `penstock` that live in it."""
    import penstock

    module = importlib.import_module(f"penstock.{package}")
    listed = getattr(module, "__all__", None) or [
        name for name in vars(module) if not name.startswith(("_", "TYPE_CHECKING"))
    ]
    top = {name: home for name, home in penstock._HOME.items() if home.split(".")[1] == package}
    lazy = package == "compat"  # torch's own names, which torch describes, are loaded when they are asked for
    loaded = vars(module) if lazy else {name: getattr(module, name, None) for name in listed}
    own = [name for name in listed if name not in top and is_of(loaded.get(name), package)]
    return [*(f"{home}.{name}" for name, home in top.items()), *(f"penstock.{package}.{name}" for name in own)]


def is_of(value: Any, package: str) -> bool:
    """Whether a package made it; what it only hands on is described elsewhere."""
    return value is not None and str(getattr(value, "__module__", "penstock." + package)).startswith(
        f"penstock.{package.split('.', maxsplit=1)[0]}"
    )


def first_line(value: Any) -> str:
    text = inspect.getdoc(value) if inspect.isclass(value) or callable(value) else ""
    line = (text or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    return re.split(r"(?<=[.:;])\s", line)[0].rstrip(":;") if line else ""


def as_prose(text: str | None) -> str:
    as_markdown = run_path(str(Path(__file__).with_name("docstrings.py")))["as_markdown"]
    return str(as_markdown((text or "").strip()))


# -- links and code blocks


def source_of(uri: str) -> Path:
    """The file of the repository from which a page is made."""
    if uri.startswith("project/"):
        return ROOT / uri.removeprefix("project/")
    if uri == "examples/index.md":
        return ROOT / "examples" / "README.md"
    return ROOT / "docs" / uri


def linked(text: str, source: Path, uri: str) -> str:
    def replace(link: re.Match[str]) -> str:
        target = page_of(Path(os.path.normpath(source.parent / link[2])))
        if target is None:
            return link[1]  # a file that the site does not show: its name alone
        return f"[{link[1]}]({os.path.relpath(target, Path(uri).parent)}{link[3] or ''})"

    return LINK.sub(replace, text)


def page_of(file: Path) -> str | None:
    """The page or picture of the site that shows a file of the repository."""
    if file == ROOT / "README.md":
        return "index.md"
    if file.is_relative_to(ROOT / "docs"):
        return str(file.relative_to(ROOT / "docs"))
    if file.name in PROJECT and file.parent == ROOT:
        return f"project/{file.name}"
    if file.parent == ROOT / "examples":
        return "examples/index.md" if file.name == "README.md" else f"examples/{file.stem}.md"
    return None


def fenced(fence: re.Match[str]) -> str:
    named = re.search(r"file=(\S+)|(title=\"[^\"]*\")", fence[2])
    title = "" if named is None else f' title="{named[1]}"' if named[1] else f" {named[2]}"
    return f"```{fence[1]}{title}\n{fence[3]}```"
