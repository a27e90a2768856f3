"""`penstock studio`: plan interactively in a browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click


@click.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="Port of the server; 0 picks a free one.",
)
@click.option("--open/--no-open", "show", default=True, help="Open the page in a browser.")
@click.option(
    "--build",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write a static page that runs Python in the browser instead of starting a server.",
)
@click.option(
    "--pyodide",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("node_modules/pyodide"),
    show_default=True,
    metavar="FOLDER",
    help="Folder of the npm package pyodide, for --build.",
)
def command(*, port: int, show: bool, folder: Path | None, pyodide: Path) -> None:
    """Choose schedule, ranks, microbatches, times, links and memory, and see timeline, memory and comparison.

    The server listens on localhost only and answers only the page that it serves. With --build there is no server: the page
    runs the planner in the browser.

    \b
    Examples:
      penstock studio
      penstock studio --port 8765 --no-open
      npm install pyodide && penstock studio --build planner
    """
    if folder is not None:
        from penstock.studio.static import build

        click.echo(f"{build(folder, pyodide)}: open this file in a browser, or serve the folder with any web server")
        return
    from penstock.studio.server import Studio

    with Studio(port=port) as studio:
        click.echo(f"{studio.address} (Ctrl-C to stop)")
        if show:
            webbrowser.open(studio.address)
        try:
            studio.serve()
        except KeyboardInterrupt:
            click.echo()
