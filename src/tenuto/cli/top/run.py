"""Runs `tenuto top`."""

from __future__ import annotations

from contextlib import closing
from importlib.util import find_spec

from tenuto.base.errors import ExtraMissing
from tenuto.client.connection import Connection
from tenuto.client.map_reader import MapReader


def run_top(url: str, api_key: str | None) -> None:
    """Shows the map of the server at `url` until the user quits. Raises `ExtraMissing` without Textual, the error
    of the server, or `Unreachable`. Once the map is shown, it waits for a server that is gone."""
    if find_spec("textual") is None:
        raise ExtraMissing('the terminal\'s map needs textual: pip install "tenuto[top]"')
    from tenuto.cli.top.app import TopApp  # noqa: PLC0415 - an extra

    with closing(Connection(url, api_key)) as connection, closing(MapReader(connection)) as reader:
        error = TopApp(reader, reader.next().result(), url).run()
        if error is not None:
            raise error
