"""Relays of a turn that continues at another replica, which may have begun it again."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from tenuto.base.turns import Delta, EndReason, TurnResult, Usage, joined
from tenuto.base.wire.between import Unsaid
from tenuto.base.wire.messages import StartTurn
from tenuto.serve.fleet.relays import news
from tenuto.serve.shared.live_turn import LiveTurn

WHOLE = [Delta((n,), f"w{n} ", n + 1) for n in range(12)]
RESULT = TurnResult(
    reason=EndReason.LENGTH,
    committed=True,
    version=1,
    kept=len(WHOLE),
    usage=Usage(prompt=1, cached=0, generated=len(WHOLE), computed=len(WHOLE)),
    max_new_tokens=len(WHOLE),
    context_left=10,
)
PIECES = st.lists(st.integers(1, 5), max_size=12)


def cut(sizes: list[int]) -> list[Delta]:
    """Returns `WHOLE` in pieces of these sizes, and a last one with the rest."""
    pieces, left = [], list(WHOLE)
    for size in sizes:
        pieces.append(joined(left[:size]))
        del left[:size]
    return [piece for piece in [*pieces, joined(left)] if piece.tokens]


@given(sizes=PIECES, start=st.integers(0, len(WHOLE)))
def test_what_was_not_said_yet_follows_however_the_output_comes(sizes: list[int], start: int) -> None:
    unsaid = Unsaid(start, sum(len(delta.text) for delta in WHOLE[:start]))
    rest = joined([more for piece in cut(sizes) if (more := unsaid.of(piece)) is not None])
    assert (rest.tokens, rest.text) == (joined(WHOLE[start:]).tokens, joined(WHOLE[start:]).text)


@given(sizes=PIECES, there=st.integers(0, len(WHOLE)), start=st.integers(0, len(WHOLE)))
def test_a_turn_that_was_begun_again_is_passed_on_from_where_the_stream_had_ended(
    sizes: list[int], there: int, start: int
) -> None:
    async def story() -> list[Delta]:
        turn = LiveTurn(StartTurn(kind="turn", tenant="", session="s"))
        for delta in WHOLE[:there]:
            turn.deliver(delta)
        heard: list[Delta] = []

        async def follow() -> None:
            async for each in news(turn, (start, sum(len(delta.text) for delta in WHOLE[:start])), ""):
                assert each.delta is not None
                heard.append(each.delta)

        following = asyncio.ensure_future(follow())
        for delta in WHOLE[there:]:
            await asyncio.sleep(0)
            turn.deliver(delta)
        turn.deliver(Delta(delivered=len(WHOLE), result=RESULT))
        await following
        return heard

    said = joined(asyncio.run(story()))
    assert said.tokens == joined(WHOLE[start:]).tokens
    assert said.text == joined(WHOLE[start:]).text
    assert said.result == RESULT
