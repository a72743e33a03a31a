"""Sessions that start from memory that running turns compute, diverge from them within a page, and are rewound into
it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tenuto.base.options import Policy, TurnParams
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tests.sim.letters import VOCAB
from tests.sim.travels import leave_and_come

if TYPE_CHECKING:
    from tests.sim.actions import RandomWorld

PATIENT = TurnParams(max_new_tokens=8, ignore_eos=True)
"""Parameters of a turn that runs for some steps."""


def overtaking(world: RandomWorld) -> list[Callable[[], None]]:
    """Returns the operations."""
    shared: dict[str, int] = {}  # leading sessions, and the number of tokens that others share
    return [partial(_overtake, world, shared), partial(_go_back, world, shared)]


def _overtake(world: RandomWorld, shared: dict[str, int]) -> None:
    """Starts a session from memory that a running turn computes. Then one of their turns is usually aborted or
    preempted, or its session closed."""
    rng = world.rng
    leader = _leader(world)
    if leader is None:
        return
    turn = world.session_of(leader).turn
    assert turn is not None
    tokens = list(turn.tokens(0, turn.prompt_length))
    common = max(1, len(tokens) - rng.choice((1, 1, 2, world.config.page_size)))
    follower = world.open(Policy(**world.own(leader)))
    if follower is None:
        return
    if rng.random() < 0.7:  # it has a history without memory
        world.adopt(follower, tokens[:common], [])
        world.submit(follower, [1], world._params(draft=True))
    else:
        world.submit(follower, [*tokens[:common], *world._tokens()[:5]] or [1], world._params(draft=True))
    for _ in range(rng.choice((1, 4, 4))):
        world.step()
        waiting = world.session_of(follower).turn if world.is_open(follower) else None
        if waiting is None or waiting.looked == "running":
            break
    if rng.random() < 0.2:
        _leave(world, leader)
    else:
        _leave(world, follower)
    if world.is_open(follower) and world.is_open(leader):
        shared[leader] = common


def _leader(world: RandomWorld) -> str | None:
    """Returns a session whose running turn has computed more than a page, or soon will."""
    rng, size = world.rng, world.config.page_size

    def ahead(session: Session) -> bool:
        memory = session.memory.turn
        return session.has_running_turn and memory is not None and memory.computed > size

    leader = world._pick(ahead)
    if leader is None and (leader := world._idle() or world.open(Policy())) is not None:
        most = max(size, min(rng.choice((3 * size, 8 * size)), world.config.context // 2))
        world.submit(leader, [rng.randrange(VOCAB) for _ in range(rng.randint(size, most) + 1)], PATIENT)
        world.step()
    if leader is None or not world.is_open(leader) or not world.session_of(leader).has_running_turn:
        return None
    return leader


def _leave(world: RandomWorld, sid: str) -> None:
    """Interrupts the session's turn before it has copied the page it shares."""
    if not world.is_open(sid) or (turn := world.session_of(sid).turn) is None or world.naive[sid].closing:
        return
    how = world.rng.random()
    if world.config.tiers and how < 0.5 and turn.session.memory.computed >= len(turn.session.history) > 0:
        _taken_away(world, turn)
    elif how < 0.5:
        world._abort(sid)
    elif how < 0.8 and turn.running:
        world.engine.pressure.preempt(turn)
        world.turns[turn.number].disturbed = True
    elif how < 0.9:
        world.close(sid, finish=False)


def _taken_away(world: RandomWorld, turn: Turn) -> None:
    """Takes the shared memory from a turn before it computes anything, aborts it, and exports its session."""
    if turn.running:
        world.engine.pressure.preempt(turn)
        world.turns[turn.number].disturbed = True
    world.engine.pressure.drop(turn.session, "pressure")
    world.abort(turn.session.id, None)
    leave_and_come(world, turn.session.id)


def _go_back(world: RandomWorld, shared: dict[str, int]) -> None:
    """Rewinds a session a little, mostly into the page that others share, and submits its next turn at once."""
    rng, size = world.rng, world.config.page_size
    sid = world._pick(lambda s: s.turn is None and s.id in shared) or world._idle()
    if sid is None:
        return
    length = len(world.naive[sid].tokens)
    end = min(shared.pop(sid, length), length)
    world.rewind(sid, position=rng.randint(max(0, end - rng.choice((2, size))), end))
    world.submit(sid, [rng.randrange(VOCAB) for _ in range(rng.randint(1, size))], world._params(draft=True))
