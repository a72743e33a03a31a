"""Flags of SGLang's server that are always on here or have no effect, so that its command lines work unchanged."""

from __future__ import annotations

from typing import Annotated

import typer

from tenuto.base.errors import ConfigError

OneDevice = Annotated[
    int,
    typer.Option("--tp-size", "--tp", "--tensor-parallel-size", help="Accepted for users of SGLang: 1.", hidden=True),
]
ALWAYS = ("--enable-streaming-session", "--enable-mixed-chunk", "--enable-metrics")
"""Flags of features that are always on here."""
TUNING = ("--mamba-", "--max-mamba-cache-size")
"""Prefixes of flags that tune SGLang's memory for recurrent state. They are ignored: here memory is divided according
to what sessions need, and state is float32."""


def check(context: typer.Context, tp_size: int) -> None:
    """Raises `ConfigError` unless the unparsed rest of the command line only has flags that are accepted and
    ignored."""
    if tp_size != 1:
        raise ConfigError(f"tp_size is {tp_size}; allowed: 1, as a model is on one device")
    value_may_follow = False
    for argument in context.args:
        if argument.startswith(TUNING):
            value_may_follow = "=" not in argument
        elif argument in ALWAYS:
            value_may_follow = False
        elif argument.startswith("-"):
            raise ConfigError(f"there is no option {argument.partition('=')[0]}; tenuto serve --help lists them")
        elif value_may_follow:
            value_may_follow = False
        else:
            raise ConfigError(f"there is an argument {argument!r}; allowed: options, as tenuto serve --help lists them")
