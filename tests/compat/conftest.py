"""The programs are run as subprocesses, by test_programs; pytest does not import them."""

from __future__ import annotations

collect_ignore = ["programs"]
