"""The command `tenuto sessions`."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tenuto.base.errors import InvalidRequest
from tenuto.cli.tables import printable, show_table

if TYPE_CHECKING:
    from tenuto.client.connection import Connection

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Url = Annotated[str, typer.Option(envvar="TENUTO_URL", show_envvar=True, help="The server's address.")]
ApiKey = Annotated[
    str | None, typer.Option(envvar="TENUTO_API_KEY", show_envvar=True, help="A key, if the server needs one.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
Id = Annotated[str, typer.Argument(help="The session's id.")]
Turn = Annotated[int | None, typer.Option(min=0, help="Number of turns from its start.")]
Position = Annotated[int | None, typer.Option(min=0, help="Number of tokens from its start.")]

DEFAULT_URL = "http://127.0.0.1:8000"
PAGE = 1000
"""Sessions or turns listed per request."""
SHOWN_TEXT = 60
"""Maximum number of characters shown of a turn's text."""


@app.callback()
def sessions() -> None:
    """See and manage the sessions of a server.

    \b
    Examples:
      tenuto sessions ls
      tenuto sessions show ID
      tenuto sessions rewind ID --turn 2
      tenuto sessions export ID - | tenuto sessions import - --url http://elsewhere:8000
    """


@app.command()
def ls(url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """List open sessions, by id."""
    with connected(url, api_key) as connection:
        found = _listed(connection, "/v1/sessions", "after")
    if as_json:
        show_json(found)
        return
    rows = [
        [view["id"], _state(view), *(str(view[name]) for name in ("turns", "tokens", "context_left")), *_times(view)]
        for view in found
    ]
    show_table(["id", "state", "turns", "tokens", "room", "idle s", "ttl s"], rows)


@app.command()
def show(session_id: Id, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Show a session and its turns."""
    from tenuto.client.wire import session_path  # noqa: PLC0415 - help is fast

    path = session_path(session_id)
    with connected(url, api_key) as connection:
        view = connection.call(connection.ask("GET", path)).result()
        turns = _listed(connection, f"{path}/turns", "first")
    if as_json:
        show_json({**view, "history": turns})
        return
    for name, value in view.items():
        if value not in (None, {}):
            typer.echo(f"{name:<13} {printable(_plain(value))}")
    if turns:
        typer.echo()
        show_table(["turn", "start", "input", "output", "replay", "text"], [_turn_row(turn) for turn in turns])


@app.command()
def fork(
    session_id: Id,
    turn: Turn = None,
    position: Position = None,
    new_id: Annotated[str | None, typer.Option("--id", help="Id of the new session.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Open a copy of a session, up to --turn or --position or with all turns, and print its id."""
    body = {"turn": turn, "position": position, "id": new_id}
    view = _ask("POST", session_id, "/fork", body, url, api_key)
    _show_session(view, as_json, "{id}")


@app.command()
def rewind(
    session_id: Id,
    turn: Turn = None,
    position: Position = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Cut a session's history back to --turn or --position."""
    view = _ask("POST", session_id, "/rewind", {"turn": turn, "position": position}, url, api_key)
    _show_session(view, as_json, "{id}: {turns} turns, {tokens} tokens, room for {context_left}")


File = Annotated[str, typer.Argument(help="A path; - is standard input or output.")]


@app.command()
def export(
    session_id: Id,
    file: File,
    state: Annotated[
        bool, typer.Option("--state", help="Include its state, so that the importing server need not compute it again.")
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Write a session to a file, for import by a server of the same model, and with --state of the same weights."""
    import msgspec  # noqa: PLC0415 - help is fast

    from tenuto.base.private import open_private  # noqa: PLC0415 - loaded where it is used

    if state:
        _export_state(session_id, file, url, api_key)
        return
    content = msgspec.json.encode(_ask("GET", session_id, "/export", None, url, api_key)) + b"\n"
    try:
        if file == "-":
            sys.stdout.buffer.write(content)
        else:
            with open_private(Path(file)) as opened:
                opened.write(content)
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be written: {error.strerror}") from error


@app.command("import")
def import_(
    file: File,
    new_id: Annotated[str | None, typer.Option("--id", help="Id to use instead of the one in the file.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Open a session from a file, with its state if the file has it, and print its id."""
    import msgspec  # noqa: PLC0415 - help is fast

    from tenuto.base.wire.state_file import is_state_file  # noqa: PLC0415 - loaded where it is used

    query: dict[str, Any] = {} if new_id is None else {"id": new_id}
    try:
        with connected(url, api_key) as connection, _on_disk(file) as path:
            with path.open("rb") as opened:
                has_state = is_state_file(opened.read(16))
            if has_state:
                view = connection.call(connection.upload("/v1/sessions/import/state", path, **query)).result()
            else:
                body = msgspec.json.decode(path.read_bytes())
                view = connection.call(connection.ask("POST", "/v1/sessions/import", body, **query)).result()
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file} is not an exported session: {error}") from error
    _show_session(view, as_json, "{id}")


@app.command()
def close(
    session_ids: Annotated[list[str], typer.Argument(help="Ids of sessions.")],
    finish: Annotated[bool, typer.Option("--finish", help="Let open turns end first.")] = False,
    erase: Annotated[
        bool, typer.Option("--erase", help="Overwrite all that is left of them in memory, tiers and the journal.")
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Close sessions. With --erase, print a receipt for each."""
    for session_id in session_ids:
        if erase:
            show_json(
                _ask("DELETE", session_id, f"?erase=true&finish={'true' if finish else 'false'}", None, url, api_key)
            )
            continue
        _ask("DELETE", session_id, f"?finish={'true' if finish else 'false'}", None, url, api_key)
        typer.echo(f"closed {session_id}")


def _export_state(session_id: str, file: str, url: str, api_key: str | None) -> None:
    from tenuto.client.wire import session_path  # noqa: PLC0415 - help is fast

    with connected(url, api_key) as connection, tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "session" if file == "-" else Path(file)
        connection.call(connection.download(f"{session_path(session_id)}/export/state", path)).result()
        if file == "-":
            with path.open("rb") as written:
                shutil.copyfileobj(written, sys.stdout.buffer)


@contextmanager
def _on_disk(file: str) -> Iterator[Path]:
    """Yields the path of the file, or for "-" of a temporary copy of standard input."""
    if file != "-":
        yield Path(file)
        return
    with tempfile.NamedTemporaryFile(prefix="tenuto-", suffix=".session") as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.flush()
        yield Path(copy.name)


@contextmanager
def connected(url: str, api_key: str | None) -> Iterator[Connection]:
    """Yields a connection to a server, and closes it."""
    from tenuto.client.connection import Connection  # noqa: PLC0415 - help is fast

    connection = Connection(url, api_key)
    try:
        yield connection
    finally:
        connection.close()


def _ask(method: str, session_id: str, action: str, body: dict[str, Any] | None, url: str, api_key: str | None) -> Any:
    """Sends a request about one session and returns the answer."""
    from tenuto.client.wire import session_path  # noqa: PLC0415 - help is fast

    with connected(url, api_key) as connection:
        return connection.call(connection.ask(method, session_path(session_id) + action, body)).result()


def _listed(connection: Connection, path: str, cursor: str) -> list[dict[str, Any]]:
    """Returns all entries listed at `path`, page by page. `cursor` is the query parameter that says where a page
    begins."""
    found: list[dict[str, Any]] = []
    query: dict[str, Any] = {}
    while True:
        page = connection.call(connection.ask("GET", path, limit=PAGE, **query)).result()
        found += page["data"]
        if page["next"] is None:
            return found
        query = {cursor: page["next"]}


def show_json(value: Any) -> None:
    """Prints a value as JSON."""
    typer.echo(json.dumps(value, indent=2))


def _show_session(view: dict[str, Any], as_json: bool, text: str) -> None:
    """Prints a session as JSON, or what `text` shows of it."""
    if as_json:
        show_json(view)
    else:
        typer.echo(text.format_map(view))


def _state(view: dict[str, Any]) -> str:
    if view["state"] != "open":
        return str(view["state"])
    return view["turn"] or "idle"


def _times(view: dict[str, Any]) -> tuple[str, str]:
    return f"{view['idle_seconds']:.0f}", "-" if view["ttl"] is None else f"{view['ttl']:g}"


def _plain(value: Any) -> str:
    return ", ".join(f"{name} {each}" for name, each in value.items()) if isinstance(value, dict) else str(value)


def _turn_row(turn: dict[str, Any]) -> list[str]:
    text = " ".join(f"{turn['input_text'] or ''} | {turn['output_text'] or ''}".split())
    lengths = (len(turn["input_tokens"]), len(turn["output_tokens"]))
    counts = (turn["number"], turn["start"], *lengths, turn["resume_cost"])
    return [*map(str, counts), text if len(text) <= SHOWN_TEXT else text[: SHOWN_TEXT - 3] + "..."]
