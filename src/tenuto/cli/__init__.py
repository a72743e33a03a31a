"""The command line. Commands import modules only when they run, so that help is fast."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from tenuto.base.config import DEFAULT_MODEL
from tenuto.base.errors import TenutoError
from tenuto.base.options import OPTIONS, TurnOptions
from tenuto.cli import fleet, journal, sessions, sglang
from tenuto.cli.options import SERVER, read_flags, with_options

CHAT_TOKENS = 1024
"""Maximum number of tokens of an answer in a chat, unless the user says otherwise: small models may repeat themselves
forever."""

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


def main() -> None:
    """Runs the command line. An error is one line on stderr and a non-zero exit status."""
    try:
        app()
    except TenutoError as error:
        typer.echo(f"tenuto: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tenuto {version('tenuto')}")
        raise typer.Exit


@app.callback()
def tenuto(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Tenuto: an LLM inference server in which the session, not the request, owns model state.

    \b
    Examples:
      tenuto pull          fetch the default model
      tenuto demo          watch sessions at work
      tenuto chat          talk to the model
    """


@app.command()
def pull(model: Annotated[str, typer.Argument(help="Like --model of chat.")] = DEFAULT_MODEL) -> None:
    """Fetch a model, unless it is already there, and print its path.

    \b
    Examples:
      tenuto pull
      tenuto pull organisation/name
    """
    from tenuto.cli.pull import pull_model  # noqa: PLC0415 - see the module's docstring

    pull_model(model)


@app.command()
@with_options(
    *("model", "device", "dtype", "context_length", "page_size", "kernels", "kv_cache_dtype", "journal"),
    temperature="0 is greedy.",
    seed="For temperatures above 0.",
    max_new_tokens=f"Per answer; {CHAT_TOKENS} if not given.",
)
def chat(
    system: Annotated[str | None, typer.Option(help="The system message of a new session.")] = None,
    **given: Any,
) -> None:
    """Talk to a model. Ctrl-C stops an answer and keeps the text shown. Ctrl-D, or Ctrl-C twice, quits at the prompt.

    Type /help to see the session commands. Lines may also come from a file or a pipe.

    \b
    Examples:
      tenuto chat --system "Answer in one sentence."
      tenuto chat --temperature 0.8 --seed 7
      tenuto chat --journal diary
      printf 'Hello!\\n/fork\\nAnd in French?\\n' | tenuto chat
    """
    from tenuto.api import Engine  # noqa: PLC0415 - loaded where it is used
    from tenuto.cli.chat import run_chat  # noqa: PLC0415 - see the module's docstring

    values = read_flags(given)
    turn = {name: values.pop(name) for name in OPTIONS.keys() & values.keys()}
    with Engine(**values) as engine:
        run_chat(engine, system, cast("TurnOptions", {"max_new_tokens": CHAT_TOKENS, **turn}))


@app.command()
@with_options("model", "device")
def demo(
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the last server running until Ctrl-C, and show its map.")
    ] = False,
    **given: Any,
) -> None:
    """Watch sessions at work on a real model: what a turn costs, barge-in, fork, rewind, the audit, and a kill -9.

    \b
    Examples:
      tenuto demo
      tenuto demo --device cuda
      tenuto demo --keep
    """
    from tenuto.demo import run_demo  # noqa: PLC0415 - see the module's docstring

    run_demo(**read_flags(given), keep=keep)


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@with_options(*SERVER)
def serve(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="A TOML file of options, instead of tenuto.toml here.")] = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Show every option's value and source, and exit.")
    ] = False,
    **given: Any,
) -> None:
    """Serve sessions over HTTP: natively, and to clients of OpenAI's and SGLang's interfaces.

    The exit status is 0 after SIGTERM or Ctrl-C once it serves, 1 if the server cannot start, and 70 if the engine
    process ended by itself: a supervisor should restart the server.

    An option without its flag takes its value from its variable (TENUTO_PORT for --port), else from tenuto.toml in the
    working directory (port = 9000).

    \b
    Examples:
      tenuto serve
      tenuto serve --port 9000 --context-length 4096 --memory 4GiB
      TENUTO_API_KEY=... tenuto serve --host 0.0.0.0
    """
    from tenuto.cli.serve import run_server  # noqa: PLC0415 - loaded where it is used
    from tenuto.cli.settings import ServerSettings  # noqa: PLC0415 - loaded where it is used

    sglang.check(context)
    settings = ServerSettings.resolve(given, config)
    if show_config:
        settings.show()
    else:
        run_server(settings)


@app.command()
def top(url: sessions.Url = sessions.DEFAULT_URL, api_key: sessions.ApiKey = None) -> None:
    """Watch a server's memory, sessions and turns in the terminal, and abort, park or close them.

    It shows what the server's /map shows in a browser, with the rights of the key. Needs: pip install "tenuto[top]"

    \b
    Examples:
      tenuto top
      TENUTO_API_KEY=... tenuto top --url http://host:8000
    """
    from tenuto.cli.top.run import run_top  # noqa: PLC0415 - loaded where it is used

    run_top(url, api_key)


app.add_typer(sessions.app, name="sessions")
app.add_typer(journal.app, name="journal")
app.add_typer(fleet.app, name="fleet")


@app.command()
def bench(
    url: sessions.Url = sessions.DEFAULT_URL,
    api_key: sessions.ApiKey = None,
    api: Annotated[str, typer.Option(help="tenuto, openai or sglang.")] = "tenuto",
    history: Annotated[
        str | None,
        typer.Option(help="session: the server keeps it; resend: every turn sends it, the default for openai."),
    ] = None,
    n: Annotated[int, typer.Option("--sessions", min=1, help="Number of sessions.")] = 8,
    turns: Annotated[int, typer.Option(min=1, help="Turns per session.")] = 8,
    input_tokens: Annotated[int, typer.Option(min=1, help="Tokens per turn; words with openai.")] = 64,
    first_input_tokens: Annotated[int | None, typer.Option(min=1, help="For the first turn, if different.")] = None,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens per turn.")] = 32,
    think_time: Annotated[float, typer.Option(min=0, help="Seconds between turns, plus or minus half.")] = 0.0,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Concurrent turns; by default all sessions.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the workload; the same seed gives the same inputs.")] = 0,
    as_json: sessions.AsJson = False,
) -> None:
    """Measure a server with sessions of several turns, over one of three interfaces.

    Every turn counts, even the first, cold one. Times are the client's: the time to the first token starts just before
    the request is sent, after the wait for --concurrency and the opening of the session. Tokens that arrive together
    share the gap before them. With openai, each piece of text counts as one token.

    \b
    Examples:
      tenuto bench --sessions 16 --turns 10
      tenuto bench --url http://host:30000 --api sglang --history resend
      tenuto bench --api openai --json > figures.json
    """
    from tenuto.cli.bench import Workload, run_bench  # noqa: PLC0415 - see the module's docstring

    first = input_tokens if first_input_tokens is None else first_input_tokens
    workload = Workload(n, turns, first, input_tokens, output_tokens, think_time, concurrency or n, seed)
    run_bench(url, api_key, api, history, workload, as_json=as_json)
