"""`penstock studio`: the planner to play with, in a browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0: any that is free.")
@click.option("--open/--no-open", "show", default=True, help="Open the page in a browser.")
@click.option(
    "--build",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write the page with Python inside it instead: a folder to open, or for any web server.",
)
@click.option(
    "--pyodide",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("node_modules/pyodide"),
    show_default=True,
    metavar="FOLDER",
    help="The npm package pyodide, for --build.",
)
def command(*, port: int, show: bool, folder: Path | None, pyodide: Path) -> None:
    """Choose schedule, ranks, microbatches, times, links and memory, and see timeline, memory and comparison at once.

    The server listens on this machine alone, and only the page that it hands out can ask it. With --build there is no
    server: the page runs the planning half itself, in the browser.

    \b
    Examples:
      penstock studio
      penstock studio --port 8765 --no-open
      npm install pyodide && penstock studio --build planner
    """
    if folder is not None:
        from penstock.studio.static import build

        click.echo(f"{build(folder, pyodide)}: open it in a browser, here or from any web server")
        return
    from penstock.studio.server import Studio

    with Studio(port=port) as studio:
        click.echo(f"{studio.address} (Ctrl-C ends it)")
        if show:
            webbrowser.open(studio.address)
        try:
            studio.serve()
        except KeyboardInterrupt:
            click.echo()
