"""The command `tenuto fleet`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tenuto.cli.sessions import DEFAULT_URL, ApiKey, AsJson, Url, connected, show_json
from tenuto.cli.tables import show_table

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def fleet() -> None:
    """See the replicas of a fleet, move sessions between them, and empty one.

    \b
    Examples:
      tenuto fleet status
      tenuto fleet move my-session --to 2
      tenuto fleet drain 1
      TENUTO_API_KEY=... tenuto fleet status --url http://host:8000
    """


@app.command()
def status(url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Show the replicas, as one of them sees them in the database."""
    with connected(url, api_key) as connection:
        view = connection.call(connection.ask("GET", "/fleet")).result()
    if as_json:
        show_json(view)
        return
    rows = [
        [
            str(each["replica"]),
            each["url"],
            _state(each),
            str(each["sessions"]),
            f"{each['running']}+{each['waiting']}",
            f"{100 * each['used']:.0f}%",
            f"{each['moves']['done']}" + (f" (+{n})" if (n := len(each["moves"]["under_way"])) else ""),
            f"{each['idle_seconds']:.1f}",
            f"{each['lease_seconds']:g}",
        ]
        for each in view["replicas"]
    ]
    show_table(["replica", "url", "state", "sessions", "turns", "memory", "moved", "heartbeat s ago", "lease s"], rows)


def _state(replica: dict[str, Any]) -> str:
    if not replica["live"]:
        return "gone"
    return "empty" if replica["empty"] else "draining" if replica["draining"] else "live"


@app.command()
def move(
    session: Annotated[str, typer.Argument(help="The session to move.")],
    to: Annotated[str, typer.Option(help="The number of a replica, or its URL.")],
    tenant: Annotated[str | None, typer.Option(help="Whose session it is, if not the key's owner's.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Move a session, with its state and its open turn, to another replica."""
    body = {"session": session, "to": to, **({"tenant": tenant} if tenant is not None else {})}
    with connected(url, api_key) as connection:
        done = connection.call(connection.ask("POST", "/fleet/move", body)).result()
    typer.echo(f"{session} has moved from {done['from']} to {done['to']}")


@app.command()
def drain(
    replica: Annotated[int, typer.Argument(help="The number of the replica.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Empty a replica: it takes nothing new, and its sessions move to others."""
    with connected(url, api_key) as connection:
        done = connection.call(connection.ask("POST", "/fleet/drain", {"replica": replica})).result()
    typer.echo(f"replica {replica} at {done['url']} is draining; see tenuto fleet status")
