"""Tokens of a session as Arrow tables, with `pyarrow`, which is optional."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from tenuto.base.errors import ExtraMissing
from tenuto.base.tokens import PackedTokens

if TYPE_CHECKING:
    import pyarrow as pa

ABOUT = b"tenuto"
"""The key in a table's metadata of what is not about single tokens, as JSON; see `PackedTokens.about`."""


def table_of(tokens: PackedTokens) -> pa.Table:
    """Returns a table with a row for each token; see `PackedTokens.columns`. Unknown values are null. Raises
    `ExtraMissing` without `pyarrow`."""
    try:
        import pyarrow as pa  # noqa: PLC0415 - it need not be installed
    except ImportError as error:
        raise ExtraMissing(
            "tokens as an Arrow table need pyarrow, which is not installed; install tenuto[arrow], or ask for JSON"
        ) from error
    columns: dict[str, Any] = tokens.columns()
    columns["logprob"] = pa.array(columns["logprob"], mask=np.isnan(columns["logprob"]))
    columns["seed"] = pa.array(columns["seed"], mask=columns["seed"] < 0)
    indices = pa.array(columns["weight_version"], mask=columns["weight_version"] < 0)
    names = pa.array(tokens.names, pa.string())
    columns["weight_version"] = pa.DictionaryArray.from_arrays(indices, names)
    return pa.table(columns, metadata={ABOUT: json.dumps(tokens.about())})


def stream_of(tokens: PackedTokens) -> bytes:
    """Returns the table in Arrow's streaming format. Raises `ExtraMissing`."""
    table = table_of(tokens)
    from pyarrow.ipc import new_stream  # noqa: PLC0415 - as above

    written = io.BytesIO()
    with new_stream(written, table.schema) as stream:
        stream.write_table(table)
    return written.getvalue()


def parquet_of(tokens: PackedTokens) -> bytes:
    """Returns the table as a Parquet file. Raises `ExtraMissing`."""
    table = table_of(tokens)
    from pyarrow.parquet import write_table  # noqa: PLC0415 - as above

    written = io.BytesIO()
    write_table(table, written)
    return written.getvalue()
