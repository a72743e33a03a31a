"""Stories of scarce memory: the order in which sessions yield, and the cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tenuto.base.options import Policy, TurnParams
from tests.sim import internals

if TYPE_CHECKING:
    from tests.sim.scenarios import Scenario

THRASHING = 1.75
"""Turns that outgrow memory compute at most this multiple of what they need; without pressure it is 1."""


def outgrow(world: Scenario) -> None:
    """Turns decode until they outgrow memory; some yield, and the recomputed tokens stay within bounds."""
    rng, config = world.rng, world.config
    for _ in range(rng.choice((0, 0, 4))):
        world.committed(rng.randint(4, 30))
    prompt, most = rng.randint(1, 30), config.context // 2
    turns = [world.say(world.opened(), world.text(prompt), most) for _ in range(config.running)]
    needed = len(turns) * (prompt + most - 1)
    if rng.random() < 0.5:
        for _ in range(rng.randint(5, 60)):
            world.step()
        big = world.opened()
        if rng.random() < 0.5:
            world.draft(big, world.text(config.context // 2))
        else:
            turn = world.say(big, world.text(config.context // 2), 3, priority=rng.choice((0, 0, 1)))
            needed += turn.prompt + 2
            turns.append(turn)
    world.play(20_000)
    for _ in range(30):
        if world.engine.idle:
            break
        world.step()
    world.watch.drafts_are_computed()
    computed = sum(turn.computed for turn in turns)
    if computed > THRASHING * needed + 40:
        world.found("thrashing", f"{computed} tokens were computed, {needed} needed")


def families(world: Scenario) -> None:  # noqa: C901 - one stretch of the story after the other
    """Many forks of one session live beside sessions that share nothing; then other turns need room."""
    rng, config = world.rng, world.config
    parent = world.committed(rng.randint(config.context // 4, config.context // 2))
    for _ in range(rng.randint(0, 4)):
        world.committed(rng.randint(8, config.context // 3))
    forks = []
    for _ in range(rng.randint(2, 12)):
        child = world.fork(parent)
        if child is not None:
            forks.append(child)
    world.step()
    for _ in range(rng.randint(0, 3)):
        world.committed(rng.randint(8, config.context // 3))
    for child in forks[: rng.randint(0, 4)]:
        if child in world.naive:
            world.say(child, world.text(rng.randint(1, 8)), rng.randint(4, 50))
    for _ in range(rng.randint(0, 6)):
        world.step()
    for _ in range(rng.randint(1, 3)):
        if (sid := world.open(Policy())) is not None:
            world.say(sid, world.text(rng.randint(8, config.context // 2)), 5, priority=rng.choice((0, 0, 1)))
            for _ in range(rng.randint(0, 3)):
                world.step()
    world.play()


def passed_over(world: Scenario) -> None:
    """A few pages are short, and sessions that share all their pages have been idle for longer than others: they are
    passed over, since they would free nothing."""
    rng, config = world.rng, world.config
    size = config.page_size
    for _ in range(rng.randint(2, 6)):
        parent = world.committed(rng.randint(2 * size, config.context // 4), rng.choice((1, 5)))
        for _ in range(rng.randint(1, 3)):
            world.fork(parent)
        for _ in range(rng.randint(1, 3)):
            world.committed(rng.randint(size, config.context // 6 + size))
        free = len(internals.reusable(world.engine, 0)) + rng.randint(0, 2)
        world.say(world.opened(), world.text(max(1, min(free * size, world.longest - 4))), rng.randint(1, 3))
        world.play()
        for sid in list(world.naive):
            world.close(sid, finish=False)


def alone(world: Scenario) -> None:
    """One session in pools that barely hold it continues from its own memory."""
    rng, config = world.rng, world.config
    sid = world.opened()
    while world.longest - len(world.naive[sid].tokens) > 2:
        room = world.longest - len(world.naive[sid].tokens)
        tokens = world.text(min(room - 1, rng.randint(1, max(1, config.context // 3))))
        most = rng.choice((None, 1, 5))
        turn = world.submit(sid, tokens, TurnParams(max_new_tokens=most, ignore_eos=True))
        if turn is None:
            return
        for _ in range(rng.choice((1, 4, 12, 300))):
            if turn.number in world.turns:
                world.step()
        if turn.number in world.turns:
            world.abort(sid, 2 if turn.started else None)
        if rng.random() < 0.4 and (child := world.fork(sid)) is not None:
            if rng.random() < 0.3:
                world.close(sid, finish=False)
            sid = child


def promotion(world: Scenario) -> None:
    """A turn of higher priority arrives that does not fit: no lower one yields in vain."""
    rng, config = world.rng, world.config
    size, pool = config.page_size, config.units[0]
    if rng.random() < 0.6:
        rng.choice((refused, exact, unwanted))(world)
        return
    world.say(world.opened(), world.text(pool * size // 2), pool * size // 4, priority=2)
    for _ in range(rng.randint(1, 30)):
        world.step()
    for _ in range(rng.randint(1, 2)):
        world.say(world.opened(), world.text(rng.randint(1, max(1, pool * size // 6))), max(1, pool * size // 8))
    for _ in range(rng.randint(1, 30)):
        world.step()
    if (sid := world.open(Policy())) is not None:
        world.say(sid, world.text(rng.randint(1, pool * size * 3 // 4)), 1, priority=1)
    world.play()


def refused(world: Scenario) -> None:
    """A turn does not fit beside two running ones; one of them ends, and it fits once idle sessions yield."""
    rng, slots = world.rng, world.config.page_size * world.config.units[0]
    for _ in range(rng.randint(3, 6)):
        world.committed(max(1, slots // 20))
    big = world.say(world.opened(), world.text(slots * 4 // 10), rng.randint(3, 20), priority=1)
    for _ in range(rng.randint(1, 3)):
        world.step()
    world.say(world.opened(), world.text(4), slots // 8, priority=1)
    world.step()
    for _ in range(rng.randint(1, 2)):
        world.say(world.opened(), world.text(slots * rng.randint(4, 5) // 10), 3)
    while big.number in world.turns:
        world.step()
    world.play()


def exact(world: Scenario) -> None:
    """A fork's turn arrives that needs exactly the free units, or a page more or less, in a single step; its first page
    is a copy."""
    rng, config = world.rng, world.config
    size = config.page_size
    parent = world.committed(size * rng.randint(1, 3) + rng.randint(1, size), 2)
    children = [child for _ in range(2) if (child := world.fork(parent)) is not None]
    for _ in range(config.running - 2):
        free = len(internals.reusable(world.engine, 0))
        if free * size <= config.budget // 2:
            break
        most = rng.randint(20, 30)
        world.say(world.opened(), world.text(max(1, min((free - 2) * size, world.longest - most))), most, priority=1)
        for _ in range(1 + config.context // (config.budget - config.running)):
            world.step()
    for child in children:
        free = len(internals.reusable(world.engine, 0)) + rng.choice((-1, 0, 0, 0))
        tokens = free * size - len(world.naive[child].tokens) % size + rng.randint(0, size)
        world.say(child, world.text(max(1, tokens)), 1)
        for _ in range(rng.randint(0, 2)):
            world.step()
    world.play()


def unwanted(world: Scenario) -> None:
    """Sessions fill memory, and a draft arrives that nothing waits for: no session yields to it. After they close, a
    dropped draft is computed again."""
    rng, slots = world.rng, world.config.page_size * world.config.units[0]
    told = [world.committed(max(1, slots // 7)) for _ in range(rng.randint(4, 7))]
    sid = world.opened()
    world.draft(sid, world.text(min(world.longest, slots) * 3 // 4))
    for _ in range(rng.randint(2, 6)):
        world.step()
    for old in (*told, sid):
        if old in world.naive:
            world.close(old, finish=False)
    sid = world.opened()
    world.draft(sid, world.text(max(2, slots // 8)))
    for _ in range(rng.randint(1, 6)):
        world.step()
    world.engine.sessions.drop(sid)
    for _ in range(4 + slots // 8):
        world.step()
        if world.engine.idle:
            break
