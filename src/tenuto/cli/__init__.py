"""The command line. Commands import what they need when they run, so that help is fast."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from tenuto.base.errors import TenutoError

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)

Model = Annotated[str, typer.Option(help="smollm2, a .gguf file, a Hugging Face directory or a hub id.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or another device PyTorch knows.")]


def main() -> None:
    """Run the command line. What went wrong is one line on stderr and a non-zero exit status."""
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
    r"""Tenuto: an LLM inference server in which the session, not the request, owns model state.

    \b
    Examples:
      tenuto pull          fetch the default model
      tenuto demo          watch what sessions are good for
      tenuto chat          talk to it
    """


@app.command()
def pull(model: Annotated[str, typer.Argument(help="As the option --model of chat.")] = "smollm2") -> None:
    r"""Fetch a model, if it is not there, and say where it is.

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
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For temperatures above 0.")] = 0,
    system: Annotated[str | None, typer.Option(help="The system message of every session.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Of one answer; as many as fit if not given.")] = None,
    context_length: Annotated[int | None, typer.Option(help="In tokens; the model's if not given.")] = None,
    page_size: Annotated[int, typer.Option(help="Token slots a page of memory.")] = 16,
) -> None:
    r"""Talk to a model. Ctrl-C stops an answer and keeps what was shown; at the prompt it quits, as does Ctrl-D.

    Type /help there for what can be done with sessions. Lines may also come from a file or a pipe.

    \b
    Examples:
      tenuto chat --system "Answer in one sentence."
      tenuto chat --temperature 0.8 --seed 7
      printf 'Hello!\n/fork\nAnd in French?\n' | tenuto chat
    """
    from tenuto.api import Engine, TurnOptions  # noqa: PLC0415
    from tenuto.cli.chat import run_chat  # noqa: PLC0415 - see the module's docstring

    config = {} if context_length is None else {"context_length": context_length}
    options = TurnOptions(temperature=temperature, seed=seed, max_new_tokens=max_new_tokens)
    with Engine(model, device=device, dtype=dtype, page_size=page_size, **config) as engine:
        run_chat(engine, system, options)


@app.command()
def demo(model: Model = "smollm2", device: Device = "cpu") -> None:
    r"""Watch sessions at work on a real model: what a turn costs, barge-in, fork, rewind, and the audit.

    \b
    Examples:
      tenuto demo
      tenuto demo --device cuda
    """
    from tenuto.demo import run_demo  # noqa: PLC0415 - see the module's docstring

    run_demo(model, device)
