"""The command `tenuto fleet`."""

from __future__ import annotations

import typer

from tenuto.cli.sessions import DEFAULT_URL, ApiKey, AsJson, Url, connected, show_json
from tenuto.cli.tables import show_table

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def fleet() -> None:
    """See the replicas of a fleet.

    \b
    Examples:
      tenuto fleet status
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
            "live" if each["live"] else "gone",
            str(each["sessions"]),
            f"{each['idle_seconds']:.1f}",
            f"{each['lease_seconds']:g}",
        ]
        for each in view["replicas"]
    ]
    show_table(["replica", "url", "state", "sessions", "heartbeat s ago", "lease s"], rows)
