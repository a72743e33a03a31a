"""Runs of units in an index: made from the units of a record, and read back as their places in files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tenuto.memory.tiers.contents import Contents
from tenuto.memory.tiers.copies import Place
from tenuto.memory.tiers.disk import Run, UnitFile


def runs_of(found: Iterator[tuple[int, str, int, bytes]], stay: Sequence[int]) -> list[Run]:
    """Returns units as runs; `found` has the group, file name, row and mark of each, in the order of groups. `stay`:
    the number of each group's first unit."""
    runs: list[Run] = []
    first = list(stay)
    for group, file, row, mark in found:
        last = runs[-1] if runs else None
        if last is not None and (last.group, last.file, last.row + last.number) == (group, file, row):
            runs[-1] = last._replace(number=last.number + 1, marks=last.marks + mark)
        else:
            runs.append(Run(group, first[group], file, row, 1, mark))
        first[group] += 1
    return runs


def usable_places(
    runs: Iterable[Run], files: Iterable[UnitFile], names: Contents, *, whole: bool
) -> tuple[list[list[Place]], int | None]:
    """Returns the places, by group, of units whose contents should be `names`, as far as `runs` lists them in one of
    `files` and with the right marks. If some are missing, also returns how many leading pages of each group can be used
    nevertheless: none with `whole`."""
    named = {file.name: file for file in files}
    places: list[list[Place]] = [[] for _ in names]
    for run in runs:
        if run.group >= len(names) or run.file not in named:
            continue
        found, held = places[run.group], names[run.group]
        for (first, mark), row in zip(_marked(run), range(run.row, run.row + run.number), strict=False):
            if first == len(found) < len(held) and held[first].mark == mark:
                found.append((named[run.file], run.group, row, held[first]))
    if all(len(found) == len(held) for found, held in zip(places, names, strict=True)):
        return places, None
    pages = 0 if whole else max(0, min(map(len, places)) - 1)  # the last one's own tokens may differ
    return [found[:pages] for found in places], pages


def _marked(run: Run) -> Iterator[tuple[int, bytes]]:
    """Yields the number of each unit of a run in its group, and its mark."""
    size = len(run.marks) // run.number if run.number > 0 else 0
    for i in range(run.number if size else 0):
        yield run.first + i, run.marks[i * size : (i + 1) * size]
