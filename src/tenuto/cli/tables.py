"""Tables: formatted on a terminal, and as plain aligned text in a pipe or file."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints `rows` under their column names. Columns of numbers are aligned to the right."""
    cells = [[printable(cell) for cell in row] for row in rows]
    right = [all(_is_number(row[number]) for row in cells) for number in range(len(columns))]
    if sys.stdout.isatty():
        _show_rich(columns, cells, right)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in (columns, *cells):
        padded = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        )
        typer.echo("  ".join(padded).rstrip())


def printable(text: str) -> str:
    """Returns the text with spaces instead of control characters, on one line."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _show_rich(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> None:
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415 - only where it is needed
    from rich.cells import cell_len  # noqa: PLC0415 - loaded where it is used
    from rich.console import Console  # noqa: PLC0415 - loaded where it is used
    from rich.table import Table  # noqa: PLC0415 - loaded where it is used
    from rich.text import Text  # noqa: PLC0415 - loaded where it is used

    table, needed = Table(box=SIMPLE_HEAD, header_style="bold"), 1
    for number, (name, to_right, *column) in enumerate(zip(columns, right, *rows, strict=True), 1):
        cuttable = number == len(columns) and not to_right  # other columns are never cut, so that ids can be copied
        table.add_column(name, justify="right" if to_right else "left", no_wrap=not cuttable, overflow="fold")
        needed += 3 + max(map(cell_len, (name, *column[: 0 if cuttable else None])))
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False, width=max(Console().width, needed)).print(table)


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.replace(".", "", 1).isdigit()
