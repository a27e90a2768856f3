"""Timeline -> table, SVG, self-contained HTML, Chrome/Perfetto trace."""
