"""The command `tenuto journal`."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tenuto.cli.sessions import AsJson
from tenuto.cli.tables import printable, show_table

if TYPE_CHECKING:
    from tenuto.session.journal_files import Use

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

File = Annotated[Path, typer.Argument(help="The journal's path, as for --journal.")]


@app.callback()
def journal() -> None:
    """Check, count and compact a journal that no server has open.

    \b
    Examples:
      tenuto journal check sessions.journal
      tenuto journal stat sessions.journal --json
      tenuto journal compact sessions.journal
    """


@app.command()
def check(file: File, as_json: AsJson = False) -> None:
    """Compare every checksum and count, and change nothing. The exit status is 1 if anything is damaged or lost."""
    from tenuto.session.journal_files import check as check_file  # noqa: PLC0415 - help is fast

    found = check_file(file)
    if as_json:
        typer.echo(json.dumps({"sound": found.sound, **asdict(found)}, indent=2))
    else:
        typer.echo(f"{found.sessions} sessions, {found.turns} turns and {found.tokens} tokens are undamaged")
        for count, what in (
            (len(found.damaged), "sessions are damaged"),
            (found.missing, "more sessions are missing, and their names are lost"),
            (found.lost_changes, "acknowledged changes are missing, unless a server's start finds them in the log"),
        ):
            if count:
                typer.echo(f"{count} {what}")
        if not found.intact:
            typer.echo("the structure of the file is damaged")
        if found.damaged:
            show_table(
                ["tenant", "session", "reason"], [[each.tenant, each.name, each.reason] for each in found.damaged]
            )
    if not found.sound:
        raise typer.Exit(1)


@app.command()
def stat(file: File, as_json: AsJson = False) -> None:
    """Count sessions, turns, tokens and bytes, by tenant."""
    from tenuto.session.journal_files import statistics  # noqa: PLC0415 - help is fast

    found = statistics(file)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
        return
    largest = "-" if found.largest is None else f"{found.largest[1]} with {found.largest[2]} tokens"
    if found.largest is not None and found.largest[0]:
        largest += f", of {found.largest[0]}"
    for name, value in (
        ("sessions", found.all.sessions),
        ("turns", found.all.turns),
        ("tokens", f"{found.all.tokens}, of which {found.stored_tokens} are stored, shared ones once"),
        ("bytes", found.bytes),
        ("free pages", f"{found.free_pages} of {found.page_bytes} bytes"),
        ("changes", "-" if found.changes is None else found.changes),
        ("last used", f"{_time(found.all.oldest)} to {_time(found.all.newest)}"),
        ("largest", largest),
    ):
        typer.echo(f"{name:<11} {printable(str(value))}")
    if found.tenants and [use.tenant for use in found.tenants] != [""]:
        typer.echo()
        show_table(["tenant", "sessions", "turns", "tokens", "oldest", "newest"], [_row(use) for use in found.tenants])


@app.command()
def compact(file: File, as_json: AsJson = False) -> None:
    """Rewrite the file without free space. If this is interrupted, the file is as it was."""
    from tenuto.session.journal_files import compact as compact_file  # noqa: PLC0415 - help is fast

    before, after = compact_file(file)
    if as_json:
        typer.echo(json.dumps({"bytes_before": before, "bytes": after}, indent=2))
    else:
        typer.echo(f"{before} bytes before, {after} now")


def _row(use: Use) -> list[str]:
    counts = (str(count) for count in (use.sessions, use.turns, use.tokens))
    return [use.tenant, *counts, _time(use.oldest), _time(use.newest)]


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(" ", "seconds")
