"""From a byte budget to pools, and questions that concern every group."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tenuto.base.errors import ConfigError
from tenuto.base.groups import GroupSpec, Kind, MemorySpec
from tenuto.memory.kinds.sliding import window_pages
from tenuto.memory.memory import (
    CHECKPOINTS,
    Memory,
    checkpoint_units,
    kept_bytes,
    kept_checkpoints,
    session_bytes,
    session_units,
    turn_units,
    units_for_budget,
)
from tenuto.memory.shape import Shape
from tests.memory.scribe import FULL, SLIDING, STATE, Someone, make_shape, make_spec
from tests.present import present


@st.composite
def specs(draw: st.DrawFn) -> MemorySpec:
    kinds = draw(st.lists(st.sampled_from(Kind), min_size=1, max_size=4))
    groups = [
        GroupSpec(
            kind,
            draw(st.integers(1, 5000)),
            draw(st.integers(2, 300)) if kind is SLIDING else 0,
            draw(st.integers(1, 500)) if kind is Kind.STATE else 0,
        )
        for kind in kinds
    ]
    return MemorySpec(draw(st.integers(1, 64)), tuple(groups))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    return make_shape(
        context_length=draw(st.integers(1, 2000)),
        max_running=draw(st.integers(1, 40)),
        max_step_tokens=draw(st.integers(1, 600)),
        overlap=draw(st.booleans()),
        lookahead=draw(st.integers(0, 20)),
    )


def cost(spec: MemorySpec, units: tuple[int, ...]) -> int:
    return sum(n * group.bytes_per_unit for n, group in zip(units, spec.groups, strict=True))


def least_budget(spec: MemorySpec, shape: Shape) -> int:
    with pytest.raises(ConfigError) as error:
        units_for_budget(spec, shape, 0, 100)
    return int(str(error.value).split("at least ")[1].split(" bytes")[0].replace(",", ""))


@given(spec=specs(), shape=shapes(), extra=st.integers(0, 10**8), expected=st.integers(1, 3000))
def test_the_units_fit_the_budget_and_at_least_one_worst_case_turn(
    spec: MemorySpec, shape: Shape, extra: int, expected: int
) -> None:
    budget = least_budget(spec, shape) + extra
    units = units_for_budget(spec, shape, budget, expected)
    assert cost(spec, units) + kept_bytes(spec, shape) <= budget
    for group, count in zip(spec.groups, units, strict=True):
        assert count >= turn_units(group, spec.page_size, shape, shape.context_length, generates=True)
    Memory(spec, units, shape)  # which refuses pools that are too small


@given(spec=specs(), shape=shapes(), budgets=st.tuples(st.integers(0, 10**8), st.integers(0, 10**8)))
def test_a_larger_budget_never_gives_fewer_units_of_any_group(
    spec: MemorySpec, shape: Shape, budgets: tuple[int, int]
) -> None:
    least = least_budget(spec, shape)
    fewer, more = (units_for_budget(spec, shape, least + extra, 100) for extra in sorted(budgets))
    assert all(a <= b for a, b in zip(fewer, more, strict=True))


@given(spec=specs(), shape=shapes())
def test_the_named_minimum_suffices_and_one_byte_less_is_refused(spec: MemorySpec, shape: Shape) -> None:
    least = least_budget(spec, shape)
    units_for_budget(spec, shape, least, 100)
    with pytest.raises(ConfigError, match=f"at least {least:,} bytes, or a shorter context length"):
        units_for_budget(spec, shape, least - 1, 100)


@given(spec=specs(), shape=shapes(), tokens=st.integers(1, 3000))
def test_older_checkpoints_get_at_most_as_many_bytes_as_everything_else(
    spec: MemorySpec, shape: Shape, tokens: int
) -> None:
    kept = kept_checkpoints(spec, shape, tokens)
    each = sum(checkpoint_units(group, spec.page_size) * group.bytes_per_unit for group in spec.groups)
    if not each:
        assert kept == 0
        return
    units = [
        session_units(g, spec.page_size, tokens) + turn_units(g, spec.page_size, shape, tokens, generates=True)
        for g in spec.groups
    ]
    assert kept * each <= cost(spec, tuple(units))
    assert kept == CHECKPOINTS or (kept + 1) * each > cost(spec, tuple(units))


@pytest.mark.parametrize(("slot", "kept"), [(10, CHECKPOINTS), (2000, 8), (10**6, 3)])
def test_larger_states_leave_room_for_fewer_checkpoints(slot: int, kept: int) -> None:
    """But the room for two sessions always includes some, besides the slots of two turns."""
    spec = MemorySpec(16, (GroupSpec(Kind.FULL, 100), GroupSpec(Kind.STATE, slot)))
    shape = make_shape(context_length=1600, checkpoint_share=0.8)
    assert kept_checkpoints(spec, shape, 800) == kept
    units = units_for_budget(spec, shape, 2 * session_bytes(spec, shape), 400)
    assert int(shape.checkpoint_share * units[1]) >= 2 * 3
    assert units[0] >= 100 + 50  # pages for a turn of the whole context, and more


def test_a_session_of_full_attention_alone_counts_only_its_pages() -> None:
    spec, shape = MemorySpec(16, (GroupSpec(Kind.FULL, 100),)), make_shape(context_length=1600)
    assert session_bytes(spec, shape) == (turn_units(spec.groups[0], 16, shape, 1600, generates=True) + 1) * 100


@given(spec=specs(), shape=shapes(), ends=st.tuples(st.integers(1, 2000), st.integers(1, 2000)))
def test_a_longer_turn_never_needs_fewer_units(spec: MemorySpec, shape: Shape, ends: tuple[int, int]) -> None:
    for group in spec.groups:
        short, long = (turn_units(group, spec.page_size, shape, end, generates=True) for end in sorted(ends))
        assert short <= long
        assert turn_units(group, spec.page_size, shape, max(ends), generates=False) <= long


@given(window=st.integers(2, 300), page_size=st.integers(1, 64), computed=st.integers(0, 2000))
def test_an_idle_session_holds_at_most_a_window_of_a_sliding_group(window, page_size: int, computed: int) -> None:
    group = GroupSpec(SLIDING, 1, window)
    assert session_units(group, page_size, computed) <= window_pages(group, page_size)


@pytest.mark.parametrize("kind", [SLIDING, STATE])
def test_pools_too_small_for_one_turn_are_refused_by_name(kind: Kind) -> None:
    spec, shape = make_spec([FULL, kind]), make_shape()
    least = turn_units(spec.groups[1], spec.page_size, shape, shape.context_length, generates=True)
    Memory(spec, [100, least], shape)
    with pytest.raises(ConfigError, match=f"{kind.value}1 has {least - 1} units; allowed: at least {least}"):
        Memory(spec, [100, least - 1], shape)


@given(pages=st.integers(1, 50), page_size=st.integers(1, 20))
def test_a_small_pool_of_full_attention_shortens_the_longest_sequence_instead(pages: int, page_size: int) -> None:
    memory = Memory(make_spec([FULL], page_size), [pages], make_shape())
    assert memory.turn_units(memory.max_length - 1, generates=True) == [pages]
    assert memory.turn_units(memory.max_length, generates=True) == [pages + 1]


def test_without_full_attention_only_the_context_limits_a_sequence() -> None:
    assert Memory(make_spec([STATE]), [4], make_shape()).max_length > 10**9


@given(taken=st.integers(0, 6), turns=st.integers(0, 6))
def test_state_slots_of_all_groups_are_reserved_together_and_unused_ones_return(taken: int, turns: int) -> None:
    memory = Memory(make_spec([STATE, FULL, STATE]), [6, 20, 9], make_shape())
    wanted = 2 * turns  # a working slot, and one for the end of the input
    assume(taken <= wanted)
    with memory.reserve(turns, Someone("admission")) as reserved:
        assert reserved.available().tolist() == [min(wanted, 6), 20, min(wanted, 9)]
        mine = reserved.take(np.array([taken, 5, taken]))
    assert [len(lease) for lease in mine] == [taken, 0, taken]  # pages are acquired as a turn grows
    assert memory.free().tolist() == [6 - taken, 20, 9 - taken]
    for lease in mine:
        lease.release()
    assert memory.free().tolist() == [6, 20, 9]


def test_a_reservation_of_state_slots_returns_in_every_group_even_if_something_raises() -> None:
    """Known fault: batch-allocated slots not returned on an error path."""
    memory = Memory(make_spec([STATE, STATE]), [6, 9], make_shape())
    with pytest.raises(ZeroDivisionError), memory.reserve(3, Someone("admission")):
        raise ZeroDivisionError
    assert memory.free().tolist() == [6, 9]


def test_while_a_step_is_in_flight_no_group_hands_out_released_units() -> None:
    memory = Memory(make_spec([FULL, STATE]), [6, 6], make_shape())
    leases = [pool.acquire(4, Someone("turn")) for pool in memory.pools]
    memory.step_submitted()
    for lease in leases:
        present(lease).release()
    assert memory.free().tolist() == [2, 2]
    memory.step_settled()
    assert memory.free().tolist() == [6, 6]
