"""The command `tenuto pull`."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from tenuto.base.config import cache_advice, cache_dir
from tenuto.models.store import resolve


def pull_model(model: str) -> None:
    """Fetches the model, with a progress bar if stderr is a terminal, and prints its path."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("start", total=None)

        def show(done: int, total: int, phase: str) -> None:
            bar.update(task, description=phase, completed=done, total=total)

        files = resolve(model, cache_dir(), show)
    typer.echo(f"{files.name} is ready: {files.path}")
    if advice := cache_advice():
        typer.echo(advice, err=True)
