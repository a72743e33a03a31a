"""Flags of SGLang's server that ask for what is always so here, or for nothing: its command lines work unchanged."""

from __future__ import annotations

from typing import Annotated

import typer

from tenuto.base.errors import ConfigError

Accepted = Annotated[bool, typer.Option(help="Accepted for users of SGLang: it is always so.", hidden=True)]
OneDevice = Annotated[
    int,
    typer.Option("--tp-size", "--tp", "--tensor-parallel-size", help="Accepted for users of SGLang: 1.", hidden=True),
]
TUNING = ("--mamba-", "--max-mamba-cache-size")
"""How flags begin that tune SGLang's memory for recurrent state. Here it is divided by what sessions need, and state is
float32."""


def check(context: typer.Context, tp_size: int) -> None:
    """Whether the rest of the command line asks for nothing. Raises `ConfigError`."""
    if tp_size != 1:
        raise ConfigError(f"tp_size is {tp_size}; allowed: 1, as a model is on one device")
    value_may_follow = False
    for argument in context.args:
        if argument.startswith(TUNING):
            value_may_follow = "=" not in argument
        elif argument.startswith("-"):
            raise ConfigError(f"there is no option {argument.partition('=')[0]}; tenuto serve --help lists them")
        elif value_may_follow:
            value_may_follow = False
        else:
            raise ConfigError(f"there is an argument {argument!r}; allowed: options, as tenuto serve --help lists them")
