"""Structured logs: one JSON object a line on stderr, or readable lines on a terminal."""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logs(level: str = "info", *, as_json: bool | None = None) -> None:
    """Configures the logs of Tenuto and the warnings of libraries; what these pass as `extra` becomes fields. `as_json`
    `None`: JSON unless stderr is a terminal. Values are escaped for the terminal, and tracebacks leave out local
    variables. `level`: one of `base.config.LEVELS`."""
    if as_json is None:
        as_json = not sys.stderr.isatty()
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.processors.format_exc_info,
    ]
    lines = structlog.dev.ConsoleRenderer(repr_native_str=True, exception_formatter=structlog.dev.plain_traceback)
    renderer = structlog.processors.JSONRenderer() if as_json else lines
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("tenuto").setLevel(level.upper())
    structlog.configure(  # without the standard library, which would take most of the time of a line
        processors=[*shared, renderer],
        logger_factory=_Writer,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )


class _Writer(structlog.WriteLogger):
    """Writes lines to stderr. `name`: the name of the logger."""

    def __init__(self, name: str) -> None:
        super().__init__(sys.stderr)
        self.name = name
