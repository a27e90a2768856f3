"""Docstrings as markdown, for the API reference: examples become code, and lists of parameters become lists.

penstock's docstrings are prose for a terminal. Three things in them mean something else in markdown: a doctest would be a
quotation, <script> an element, and a list like

    ``rank``    the rank that waits
    ``action``  what it waits for

would be one long line.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from textwrap import indent

import griffe

ENTRY = re.compile(r"^(`{1,2}[^`]+`{1,2}(?:, `{1,2}[^`]+`{1,2})*)\s{2,}(\S.*)$")


def as_markdown(text: str) -> str:
    """
    >>> as_markdown("Adds.\\n>>> 1 + 1\\n2")
    'Adds.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```'
    >>> print(as_markdown("`a`   first\\n      and more\\n`b`   second"))
    - `a`: first and more
    - `b`: second
    """
    text = "\n\n".join(as_code(paragraph) for paragraph in text.split("\n\n"))
    made: list[str] = []
    kind = "text"  # of the line before: text, example or entry
    for line in text.splitlines():
        entry = ENTRY.match(line)
        if kind == "example" and line.strip():
            made.append(line)
        elif kind == "example":
            made += ["```", "", line]
            kind = "text"
        elif line.startswith(">>> "):
            made += ["", "```pycon", line]
            kind = "example"
        elif entry:
            made += ["", ""] if kind == "text" and made and made[-1] else []
            made.append(f"- {entry[1]}: {entry[2]}")
            kind = "entry"
        elif kind == "entry" and line.startswith("    "):
            made[-1] += " " + line.strip()
        else:
            if kind == "entry" and line.strip():
                made.append("")
            made.append(line if line.startswith("    ") else escaped(line))
            kind = "text" if line.strip() else kind
    if kind == "example":
        made.append("```")
    return "\n".join(made)


def as_code(paragraph: str) -> str:
    """A paragraph that is Python, indented as code is in markdown.

    >>> as_code("step(x)  # once"), as_code("A step.")
    ('    step(x)  # once', 'A step.')
    """
    try:
        parsed = ast.parse(paragraph)
    except SyntaxError:
        return paragraph
    code = any(isinstance(node, ast.Call | ast.Attribute | ast.Subscript) for node in ast.walk(parsed))
    return indent(paragraph, "    ") if code else paragraph


def escaped(line: str) -> str:
    """
    >>> escaped("into a <style>, or `<style>`")
    'into a &lt;style>, or `<style>`'
    """
    parts = line.split("`")
    return "`".join(part if place % 2 else part.replace("<", "&lt;") for place, part in enumerate(parts))


class Docstrings(griffe.Extension):
    """Called for every object that is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring is not None:
            first, *rest = obj.docstring.value.splitlines() or [""]
            margin = " " * lost_margin(obj)
            obj.docstring.value = as_markdown("\n".join([first, *(margin + line if line else "" for line in rest)]))


def lost_margin(obj: griffe.Object) -> int:
    """How far the lines after the first are indented beyond it, all of them: an example, which is dedented on reading."""
    said = obj.docstring
    if said is None or said.lineno is None or said.endlineno is None or not isinstance(obj.filepath, Path):
        return 0
    first, *rest = obj.filepath.read_text(encoding="utf-8").splitlines()[said.lineno - 1 : said.endlineno]
    indents = [len(line) - len(line.lstrip()) for line in rest if line.strip(' "')]
    return max(0, min(indents, default=0) - (len(first) - len(first.lstrip())))
