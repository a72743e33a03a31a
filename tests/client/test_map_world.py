"""The map of a client is what the events of the feed add up to."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.map_feed import KINDS, About, Change, Picture, PoolAbout, ShownPool, ShownSession, WholeHead
from tenuto.client.map_world import What, World, expanded
from tenuto.serve.map_state import ranges

UNITS = 40
Held = dict[int, int]
"""Units of a session, with the kinds of their holders."""

held = st.dictionaries(st.integers(0, UNITS - 1), st.integers(0, len(KINDS) - 1))
events = st.lists(st.dictionaries(st.integers(1, 4), st.none() | held, max_size=3), min_size=1, max_size=6)
units = st.sets(st.integers(0, UNITS - 1))


def in_pairs(numbers: set[int]) -> list[int]:
    return ranges(np.array(sorted(numbers), np.int32))


def head(limbo: set[int], other: set[int]) -> msgspec.Raw:
    pool = ShownPool(free=UNITS, limbo=in_pairs(limbo), other=in_pairs(other))
    counts: dict[str, Any] = dict.fromkeys(
        ("steps", "open", "running", "rows", "queued", "computed", "generated", "restored"), 0
    )
    whole = WholeHead(t=1, more=False, busy=0, tiers={}, moves={}, pools=[pool], audit=None, **counts)
    return msgspec.Raw(msgspec.json.encode(whole))


def session(number: int, mine: Held) -> ShownSession:
    found = [(kind, {unit for unit, of in mine.items() if of == kind}) for kind in range(len(KINDS))]
    leases = [(0, kind, in_pairs(numbers)) for kind, numbers in found if numbers]
    counts: dict[str, Any] = dict.fromkeys(
        ("forked", "turns", "tokens", "computed", "parked", "saved", "since", "version"), 0
    )
    flags: dict[str, Any] = {
        "listed": True,
        "pinned": False,
        "arriving": False,
        "state": "open",
        "tier": "",
        "tenant": "",
    }
    return ShownSession(n=number, id=f"s{number}", parent=None, recent=[], held=leases, **counts, **flags)


def kind_of(unit: int, sessions: dict[int, Held], limbo: set[int], other: set[int]) -> tuple[What, int]:
    """Returns what a unit is and, if one session has it, which."""
    owners = [number for number, mine in sessions.items() if unit in mine]
    if unit in limbo:
        return What.LIMBO, 0
    if len(owners) > 1:
        return What.SHARED, 0
    if not owners:
        return (What.OTHER if unit in other else What.FREE), 0
    by_kind = (What.TURN, What.SESSION, What.CLOSED, What.CHECKPOINT, What.CHECKPOINT)
    return by_kind[sessions[owners[0]][unit]], owners[0]


@given(events, units, units)
def test_every_unit_is_what_its_holders_say(
    told: list[dict[int, Held | None]], limbo: set[int], other: set[int]
) -> None:
    pools = [PoolAbout(name="full", capacity=UNITS, slots=16, unit_bytes=512)]
    about = About(model="m", compute="c", tenant=None, admin=True, pools=pools)
    world, sessions = World(Picture(head=head(set(), set()), sessions=[], about=about)), dict[int, Held]()
    for event in told:
        gone = [number for number, mine in event.items() if mine is None]
        changed = {number: mine for number, mine in event.items() if mine is not None}
        world.apply(Change(head=head(limbo, other), sessions=[session(*each) for each in changed.items()], gone=gone))
        sessions = {number: mine for number, mine in (sessions | changed).items() if number not in gone}
    (pool,) = world.pools
    wanted = [kind_of(unit, sessions, limbo, other) for unit in range(UNITS)]
    assert [(cell.what, cell.session) for cell in pool.cells(UNITS)] == wanted
    assert pool.sum() == {what: sum(of is what for of, _ in wanted) for what in What}
    assert world.units == {number: len(mine) for number, mine in sessions.items()}
    for number, mine in sessions.items():
        others = {unit for other_number, of in sessions.items() if other_number != number for unit in of}
        assert world.shared(world.sessions[number]) == len(mine.keys() & others)


@given(held, st.integers(1, 60))
def test_a_part_of_a_pool_is_what_most_of_its_held_units_are(mine: Held, number: int) -> None:
    pools = [PoolAbout(name="full", capacity=UNITS, slots=16, unit_bytes=512)]
    about = About(model="m", compute="c", tenant=None, admin=True, pools=pools)
    world = World(Picture(head=head(set(), set()), sessions=[session(1, mine)], about=about))
    every, number = world.pools[0].cells(UNITS), min(number, UNITS)
    for place, cell in enumerate(world.pools[0].cells(number)):
        part = [each.what for unit, each in enumerate(every) if unit * number // UNITS == place]
        there: list[What] = [what for what in part if what is not What.FREE]
        assert cell.share == len(there) / len(part)
        assert there.count(cell.what) == max(map(there.count, there), default=0)
        assert cell.session == bool(there)


@given(units)
def test_ranges_are_read_as_they_were_written(numbers: set[int]) -> None:
    assert expanded(in_pairs(numbers)).tolist() == sorted(numbers)
