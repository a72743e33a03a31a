"""The page tables that native kernels read through."""

from __future__ import annotations

import numpy as np

from tenuto.base.plan import TableChanges
from tenuto.exec.native_forward import _Table


def changes(*entries: tuple[int, int, int]) -> TableChanges:
    """Returns changes from rows, entries in them, and pages."""
    return TableChanges(*(np.array(column, np.int32) for column in zip(*entries, strict=True)))


def test_a_page_table_widens_for_the_longest_row_and_keeps_its_entries() -> None:
    table = _Table(2)
    table.apply(changes((0, 0, 7), (1, 63, 8)))
    table.apply(changes((0, 200, 9), (1, 0, 10)))
    assert [table.pages[place] for place in ((0, 0), (1, 63), (0, 200), (1, 0))] == [7, 8, 9, 10]
    assert table.pages.flags.c_contiguous
