"""Flags of SGLang's server that are always on here or have no effect, so that its command lines work unchanged."""

from __future__ import annotations

import typer

from tenuto.base.errors import ConfigError

ALWAYS = ("--enable-streaming-session", "--enable-mixed-chunk", "--enable-metrics")
"""Flags of features that are always on here."""
TUNING = ("--mamba-", "--max-mamba-cache-size")
"""Prefixes of flags that tune SGLang's memory for recurrent state. They are ignored: here memory is divided according
to what sessions need, and state is float32."""


def check(context: typer.Context) -> None:
    """Raises `ConfigError` unless the unparsed rest of the command line only has flags that are accepted and
    ignored."""
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
