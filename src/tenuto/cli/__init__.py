"""The command line. Commands import what they need when they run, to keep help fast."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tenuto.base.errors import TenutoError
from tenuto.cli import sessions, sglang

if TYPE_CHECKING:
    from tenuto.base.config import EngineOptions

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)

MODELS = "smollm2, a .gguf file, a Hugging Face directory or a hub id."
Model = Annotated[str, typer.Option(help=MODELS)]
ServedModel = Annotated[str, typer.Option("--model", "--model-path", help=MODELS)]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16; native kernels take weights as they are stored if not given."),
]
ContextLength = Annotated[int | None, typer.Option(help="In tokens; the model's if not given.")]
Kernels = Annotated[
    str, typer.Option(help="What computes: auto, amx, avx512_bf16, avx512, avx2 (all for CPUs) or torch.")
]
KVCache = Annotated[
    str,
    typer.Option(help="Keys and values in memory: auto (16 bits on CPUs), or int8, half of it (native kernels only)."),
]
PageSize = Annotated[int, typer.Option(help="Token slots a page of memory.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or another device PyTorch knows.")]


def main() -> None:
    """Run the command line. An error is one line on stderr and a non-zero exit status."""
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
      tenuto demo          watch what sessions are good for
      tenuto chat          talk to it
    """


@app.command()
def pull(model: Annotated[str, typer.Argument(help="As --model of chat.")] = "smollm2") -> None:
    """Fetch a model, unless it is already there, and print its path.

    \b
    Examples:
      tenuto pull
      tenuto pull organisation/name
    """
    from tenuto.cli.pull import pull_model  # noqa: PLC0415 - see the module's docstring

    pull_model(model)


@app.command()
def chat(
    model: Model = "smollm2",
    device: Device = "cpu",
    dtype: Dtype = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For temperatures above 0.")] = 0,
    system: Annotated[str | None, typer.Option(help="The system message of a new session.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Per answer; as many as fit if not given.")] = None,
    context_length: ContextLength = None,
    page_size: PageSize = 32,
    kernels: Kernels = "auto",
    kv_cache_dtype: KVCache = "auto",
    journal: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="A file that keeps the sessions; a chat that starts with it goes on with them. none: they end.",
        ),
    ] = "none",
) -> None:
    """Talk to a model. Ctrl-C stops an answer and keeps what was shown; at the prompt it quits, as does Ctrl-D.

    Type /help to see the session commands. Lines may also come from a file or a pipe.

    \b
    Examples:
      tenuto chat --system "Answer in one sentence."
      tenuto chat --temperature 0.8 --seed 7
      tenuto chat --journal diary
      printf 'Hello!\\n/fork\\nAnd in French?\\n' | tenuto chat
    """
    from tenuto.api import Engine  # noqa: PLC0415 - loaded where it is used
    from tenuto.base.options import TurnOptions  # noqa: PLC0415 - loaded where it is used
    from tenuto.cli.chat import run_chat  # noqa: PLC0415 - see the module's docstring

    config: EngineOptions = {} if context_length is None else {"context_length": context_length}
    options = TurnOptions(temperature=temperature, seed=seed, max_new_tokens=max_new_tokens)
    kept = None if journal == "none" else journal
    with Engine(
        model,
        device=device,
        dtype=dtype,
        page_size=page_size,
        kernels=kernels,
        kv_cache_dtype=kv_cache_dtype,
        journal=kept,
        **config,
    ) as engine:
        run_chat(engine, system, options)


@app.command()
def demo(model: Model = "smollm2", device: Device = "cpu") -> None:
    """Watch sessions at work on a real model: what a turn costs, barge-in, fork, rewind, the audit, and a kill -9.

    \b
    Examples:
      tenuto demo
      tenuto demo --device cuda
    """
    from tenuto.demo import run_demo  # noqa: PLC0415 - see the module's docstring

    run_demo(model, device)


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def serve(
    context: typer.Context,
    model: ServedModel = "smollm2",
    device: Device = "cpu",
    dtype: Dtype = None,
    host: Annotated[str, typer.Option(help="Anything but this machine needs an API key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; may be given several times.")
    ] = None,
    any_model_name: Annotated[
        bool, typer.Option(help="Clients may call the model anything: for those that insist on a name.")
    ] = False,
    api_key: Annotated[
        str | None, typer.Option(envvar="TENUTO_API_KEY", show_envvar=True, help="The key that clients must give.")
    ] = None,
    admin_api_key: Annotated[
        str | None, typer.Option(envvar="TENUTO_ADMIN_API_KEY", show_envvar=True, help="A key with all rights.")
    ] = None,
    keys: Annotated[Path | None, typer.Option(help="A TOML file of keys, tenants and limits.")] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="For the state of sessions: bytes, a size such as 4GiB, or a share of the device's memory such as 0.5;"
            " by default, what is free.",
        ),
    ] = None,
    page_size: PageSize = 32,
    kernels: Kernels = "auto",
    kv_cache_dtype: KVCache = "auto",
    context_length: ContextLength = None,
    chunked_prefill_size: Annotated[int, typer.Option(help="The most tokens one step computes.")] = 1024,
    mixed_chunk_size: Annotated[int, typer.Option(help="The most tokens of a step in which turns decode.")] = 512,
    max_running_requests: Annotated[int, typer.Option(help="The most turns in one step.")] = 32,
    max_queued_requests: Annotated[int, typer.Option(help="The most turns that wait for a step.")] = 10_000,
    max_sessions: Annotated[int, typer.Option(help="The most open sessions.")] = 100_000,
    session_ttl: Annotated[
        str,
        typer.Option(
            metavar="SECONDS",
            help="How long a session without a turn stays open, unless its request says otherwise; 0 or none: forever"
            " if its client named it, else for a day. A fork or trim inherits the TTL of its source.",
        ),
    ] = "86400",
    drain_seconds: Annotated[float, typer.Option(min=0, help="How long turns may continue after SIGTERM.")] = 5.0,
    unread_seconds: Annotated[
        float,
        typer.Option(
            min=0.1,
            help="A client that reads nothing of its answer for this long counts as gone; its system may announce"
            " reads only in pieces of 64 KiB or more.",
        ),
    ] = 30.0,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Per request.")] = 32 * 2**20,
    max_state_bytes: Annotated[
        int, typer.Option(min=1, help="Of all sessions being imported with their state, which go to temporary files.")
    ] = 2**34,
    max_bodies_bytes: Annotated[int, typer.Option(min=1, help="Of all open requests together.")] = 2**30,
    max_connections: Annotated[int, typer.Option(min=1, help="The most open connections.")] = 4096,
    header_seconds: Annotated[
        float, typer.Option(min=0.1, max=3600, help="How long a request's headers may take to arrive.")
    ] = 10.0,
    body_seconds: Annotated[
        float, typer.Option(min=0.1, max=3600, help="How long its body may take; one second more for every KiB.")
    ] = 30.0,
    keep_alive_seconds: Annotated[
        int, typer.Option(min=1, max=3600, help="How long a connection may be idle between requests.")
    ] = 5,
    public_metrics: Annotated[bool, typer.Option(help="Show /metrics without an admin key.")] = False,
    journal: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="A file in which committed sessions survive the server; one that starts with it goes on with them."
            " none: they end with it.",
        ),
    ] = "none",
    prefix_cache: Annotated[
        bool,
        typer.Option(
            help="Requests begin with what any session of their tenant, closed ones included, has in memory of the same"
            " tokens.",
        ),
    ] = True,
    host_tier: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Host memory for sessions that have to leave the device: bytes, or a size such as 4GiB. 0: none.",
        ),
    ] = "0",
    disk_tier: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="A directory for what host memory cannot hold of them. none: they are computed again."
        ),
    ] = "none",
    disk_tier_size: Annotated[
        str, typer.Option(metavar="SIZE", help="The most bytes in it, as of --host-tier. 0: no limit.")
    ] = "0",
    snapshot_seconds: Annotated[
        float,
        typer.Option(
            help="With --journal and --disk-tier: how long a server that ends may write sessions' memory there."
        ),
    ] = 30.0,
    overlap: Annotated[int, typer.Option(help="1: plan a step while the previous one is computed.")] = 0,
    audit_every: Annotated[
        int, typer.Option(min=0, help="Recount all memory every so many steps, a little at each. 0: only on demand.")
    ] = 1000,
    strict: Annotated[
        bool, typer.Option("--strict", help="Recount all memory after every step, and log every recount.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    disable_radix_cache: Annotated[bool, typer.Option("--disable-radix-cache", help="--no-prefix-cache.")] = False,
    enable_streaming_session: sglang.Accepted = False,  # noqa: ARG001 - it is always so
    enable_mixed_chunk: sglang.Accepted = False,  # noqa: ARG001 - likewise
    enable_metrics: sglang.Accepted = False,  # noqa: ARG001 - likewise
    tp_size: sglang.OneDevice = 1,
) -> None:
    """Serve sessions over HTTP: natively, and to clients of OpenAI's and SGLang's interfaces.

    The exit status is 0 after SIGTERM or Ctrl-C once it serves, 1 if the server cannot start, and 70 if the engine
    process ended by itself: a supervisor should restart the server.

    \b
    Examples:
      tenuto serve
      tenuto serve --port 9000 --context-length 4096 --memory 4GiB
      TENUTO_API_KEY=... tenuto serve --host 0.0.0.0
    """
    from tenuto.base.wire.messages import WorkerSettings  # noqa: PLC0415 - see the module's docstring
    from tenuto.cli.memory import read_memory, read_size  # noqa: PLC0415 - loaded where it is used
    from tenuto.cli.serve import run_server  # noqa: PLC0415 - loaded where it is used
    from tenuto.serve.shared.settings import ServeSettings, read_keys, read_ttl  # noqa: PLC0415 - loaded where it is used

    sglang.check(context, tp_size)
    held = read_keys(keys, api_key, admin_api_key)
    config: EngineOptions = {
        "tenant_weights": held.weights,
        "token_budget": chunked_prefill_size,
        "mixed_budget": mixed_chunk_size,
        "max_running": max_running_requests,
        "max_queued": max_queued_requests,
        "max_sessions": max_sessions,
        "overlap": overlap,
        "prefix_cache": prefix_cache and not disable_radix_cache,
        "audit_every": audit_every,
        "strict": strict,
        "host_tier": read_size("host_tier", host_tier),
        "disk_tier": "" if disk_tier == "none" else disk_tier,
        "disk_tier_size": read_size("disk_tier_size", disk_tier_size),
        "snapshot_seconds": snapshot_seconds,
    }
    if context_length is not None:
        config["context_length"] = context_length
    memory_bytes = read_memory(memory, device) if memory is not None else None
    worker = WorkerSettings(
        model=model,
        device=device,
        dtype=dtype,
        memory_bytes=memory_bytes,
        page_size=page_size,
        kernels=kernels,
        kv_cache_dtype=kv_cache_dtype,
        journal=None if journal == "none" else journal,
        config=config,
        log_level=log_level,
    )
    settings = ServeSettings(
        host=host,
        port=port,
        keys=held,
        served_names=tuple(served_model_name or ()),
        any_model_name=any_model_name,
        max_body_bytes=max_body_bytes,
        max_state_bytes=max_state_bytes,
        max_bodies_bytes=max_bodies_bytes,
        max_connections=max_connections,
        header_seconds=header_seconds,
        body_seconds=body_seconds,
        keep_alive_seconds=keep_alive_seconds,
        session_ttl=read_ttl(session_ttl),
        drain_seconds=drain_seconds,
        unread_seconds=unread_seconds,
        public_metrics=public_metrics,
    )
    run_server(worker, settings, log_level)


app.add_typer(sessions.app, name="sessions")


@app.command()
def bench(
    url: sessions.Url = sessions.DEFAULT_URL,
    api_key: sessions.ApiKey = None,
    api: Annotated[str, typer.Option(help="tenuto, openai or sglang.")] = "tenuto",
    history: Annotated[
        str | None,
        typer.Option(help="session: the server keeps it; resend: every turn carries it, the default for openai."),
    ] = None,
    n: Annotated[int, typer.Option("--sessions", min=1, help="How many sessions.")] = 8,
    turns: Annotated[int, typer.Option(min=1, help="Per session.")] = 8,
    input_tokens: Annotated[int, typer.Option(min=1, help="Per turn; with openai, words.")] = 64,
    first_input_tokens: Annotated[int | None, typer.Option(min=1, help="Of the first turn, if different.")] = None,
    output_tokens: Annotated[int, typer.Option(min=1, help="Per turn.")] = 32,
    think_time: Annotated[float, typer.Option(min=0, help="Seconds between turns, give or take half.")] = 0.0,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Turns at once; all sessions if not given.")] = None,
    seed: Annotated[int, typer.Option(help="Of the workload; the same seed gives the same inputs.")] = 0,
    as_json: sessions.AsJson = False,
) -> None:
    """Measure a server with sessions that take turns, over any of three interfaces.

    Every turn counts, even the first, cold one. Times are the client's: the first token is timed from just before the
    request is sent, not counting the wait for a place under --concurrency or opening the session. Tokens that arrive
    together share the gap before them. With openai, each piece of text counts as one token.

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
