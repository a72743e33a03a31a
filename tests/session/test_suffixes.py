"""The index of where tokens have occurred before."""

from __future__ import annotations

from array import array
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.session.suffixes import ONE_BY_ONE, ORDER, SessionSuffixes, Suffixes, hash_of


def filled(tokens: array[int], cuts: list[int]) -> Suffixes:
    """Returns an index of `tokens`, added in parts that end at `cuts`."""
    suffixes, done = Suffixes(), 0
    for end in [*sorted(cuts), len(tokens)]:
        suffixes.add(tokens[max(0, done - ORDER + 1) : end], end)
        done = end
    return suffixes


@given(st.lists(st.integers(0, 40), min_size=3, max_size=60), st.lists(st.integers(0, 60), max_size=8), st.data())
def test_positions_of_equal_tokens_are_found_however_they_were_added(
    ids: list[int], cuts: list[int], data: st.DataObject
) -> None:
    tokens = array("i", ids)
    suffixes = filled(tokens, [min(cut, len(ids)) for cut in cuts])
    end = data.draw(st.integers(ORDER, len(ids)))
    found = suffixes.find(hash_of(tokens[end - ORDER : end]))
    equal = [p for p in range(ORDER, len(ids) + 1) if ids[p - ORDER : p] == ids[end - ORDER : end]]
    assert set(found) <= {0, *equal}
    assert found[0] in (0, equal[-1])  # 0: displaced by others


@pytest.mark.parametrize("step", [1, ONE_BY_ONE + 1, 10_000])
def test_most_positions_of_a_long_sequence_are_found_and_take_at_most_16_bytes(step: int) -> None:
    rng = Random(0)
    tokens = array("i", [rng.randrange(50_000) for _ in range(10_000)])
    suffixes = filled(tokens, list(range(step, len(tokens), step)))
    found = sum(p in suffixes.find(hash_of(tokens[p - ORDER : p])) for p in range(ORDER, len(tokens)))
    assert found > 0.65 * len(tokens)
    assert suffixes.bytes <= 16 * len(tokens)


def test_a_fork_shares_the_index_and_adds_its_own_tokens() -> None:
    parent, rng = SessionSuffixes(Suffixes()), Random(1)
    common = array("i", [rng.randrange(1000) for _ in range(30)])
    parent.suffixes.add(common, 30)
    parent.length = 30
    child = parent.fork(20)
    assert (child.suffixes, child.length) == (parent.suffixes, 20)
    other = common[18:20] + array("i", [7, 8, 9])
    child.suffixes.add(other, 23)
    assert 23 in parent.suffixes.find(hash_of([7, 8, 9]))
    assert 15 in child.suffixes.find(hash_of(common[12:15]))


def test_a_cleared_index_finds_nothing_and_says_so() -> None:
    suffixes = Suffixes()
    suffixes.add(array("i", range(100)), 100)
    suffixes.clear()
    assert suffixes.find(hash_of([5, 6, 7])) == (0, 0)
    assert suffixes.clearings == 1
