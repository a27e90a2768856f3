"""Timeline -> table, SVG, self-contained HTML, Chrome/Perfetto trace."""

from __future__ import annotations

from penstock.show.chrome_trace import dump_trace, to_trace
from penstock.show.html import Section, timeline_section, to_html
from penstock.show.summary import summary, summary_text
from penstock.show.svg import to_svg
from penstock.show.table import coloured_table, listing, show_table, to_table

__all__ = [
    "Section",
    "coloured_table",
    "dump_trace",
    "listing",
    "show_table",
    "summary",
    "summary_text",
    "timeline_section",
    "to_html",
    "to_svg",
    "to_table",
    "to_trace",
]
