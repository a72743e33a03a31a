"""Stories of drafts, failing steps, shared pages, late results, and thousands of sessions. Memory is ample."""

from __future__ import annotations

from math import ceil, log2
from typing import TYPE_CHECKING

from tenuto.base.groups import Kind
from tenuto.base.options import TurnParams
from tenuto.base.sampling import Sampling
from tenuto.base.turns import EndReason
from tenuto.sched.suspects import MAX_FAILURES
from tests.sim import internals
from tests.sim.letters import VOCAB

if TYPE_CHECKING:
    from tests.sim.scenarios import Scenario

ISOLATED_WITHIN = 60
"""Steps within which a turn that makes steps fail ends after its first failure."""


def typing(world: Scenario) -> None:
    """A draft is extended while it is computed: no token is computed twice, and sending it computes nothing again."""
    rng, config = world.rng, world.config
    sid = world.committed(rng.randint(1, 40))
    had = world.session_of(sid).memory.computed
    text, edits = world.text(rng.randint(1, config.context // 3)), 0
    turn = world.draft(sid, text)
    assert turn is not None
    naive = world.turns[turn.number]
    for _ in range(rng.randint(0, 60)):
        for _ in range(rng.choice((0, 1, 1, 2))):
            world.step()
        text = text + world.text(rng.choice((1, 1, 3)))
        world.draft(sid, text)
        edits += 1
    for _ in range(rng.choice((0, 2, 5, 30))):
        world.step()
    most = rng.randint(1, 6)
    sent = TurnParams(max_new_tokens=most, ignore_eos=True)
    world.submit(sid, text, sent)
    world.play()
    needed = naive.prompt + most - 1 - had
    allowed = needed + 4 + 2 * edits
    if naive.computed > allowed:
        world.found(
            "typing", f"{naive.computed} tokens were computed for a draft that needed {needed}, in {edits} changes"
        )
    world.rewind(sid, position=naive.base)
    left = world.session_of(sid).memory.computed
    if left < had:
        world.found("kept memory", f"rewound to the start of a turn: {left} tokens are in memory, {had} were before")


def editing(world: Scenario) -> None:
    """A draft is changed in the middle: tokens before the change are not recomputed, except those after the last
    checkpoint or in the window."""
    rng, config = world.rng, world.config
    sid = world.opened()
    text = world.text(rng.randint(2, config.context // 3))
    turn = world.draft(sid, text)
    assert turn is not None
    naive = world.turns[turn.number]
    given = len(text)
    coarse = any(group.kind is not Kind.FULL for group in config.groups)
    interval = -(-config.interval // config.page_size) * config.page_size
    for _ in range(rng.randint(1, 12)):
        for _ in range(rng.choice((0, 1, 2, 9))):
            world.step()
        at = rng.randint(0, len(text))
        new = text[:at] + world.text(rng.randint(0, 9))
        kept = next((i for i, (a, b) in enumerate(zip(text, new, strict=False)) if a != b), min(len(text), len(new)))
        given += len(new) - kept + 2 + (min(interval + config.page_size, kept) if coarse else 0)
        text = new
        world.draft(sid, text)
    world.submit(sid, text or [1], TurnParams(max_new_tokens=3, ignore_eos=True))
    world.play()
    if naive.computed > given + 8:
        world.found("typing", f"{naive.computed} tokens were computed for a draft; its changes allow {given}")


def failing(world: Scenario) -> None:
    """A few steps fail: only those steps are lost, and no turn is recomputed or delayed for long."""
    rng, config = world.rng, world.config
    turns = [
        world.say(world.opened(), world.text(rng.randint(1, 30)), rng.randint(20, 60)) for _ in range(config.running)
    ]
    needed = sum(turn.prompt + turn.most - 1 for turn in turns)
    longest = (
        max(turn.most for turn in turns) + sum(len(turn.input) for turn in turns) // config.budget + config.running
    )
    began, again, failures = world.executor.tokens, world.again, rng.randint(1, 4)
    for _ in range(failures):
        for _ in range(rng.randint(1, 12)):
            world.step()
        world.forced += 1
    late = world.opened()
    for _ in range(3):
        world.step()
    if len(turns) > sum(turn.number in world.turns for turn in turns):
        world.say(late, [1, 2], 2)
        needed += 3
    steps = world.play()
    computed = world.executor.tokens - began
    again = world.again - again + (failures + 1) * (2 * config.budget + 2 * config.running)
    if computed > needed + again:
        world.found("failures", f"{failures} failed steps: {computed} tokens were computed, {needed} needed")
    if steps > longest + ISOLATED_WITHIN * 2:
        world.found("failures", f"{failures} failed steps: it took {steps} steps, {longest} would be enough")


def poisoned(world: Scenario) -> None:
    """Every step with a certain turn fails: it soon ends as failed, and the others hardly notice."""
    rng, config = world.rng, world.config
    count = max(1, config.running - 1)
    turns = [world.say(world.opened(), world.text(rng.randint(1, 30)), rng.randint(30, 80)) for _ in range(count)]
    needed = sum(turn.prompt + turn.most - 1 for turn in turns)
    began, again = world.executor.tokens, world.again
    for _ in range(rng.randint(0, 20)):
        world.step()
    bad = world.say(world.opened(), world.text(rng.randint(1, 60)), 30)
    bad.poisoned_from = rng.choice((-1, rng.randint(0, bad.prompt), bad.prompt - 1, bad.prompt + 8))
    before, since = world.failures, None
    while bad.number in world.turns:
        world.step()
        since = world.steps if since is None and world.failures > before else since
        if since is not None and world.steps - since > ISOLATED_WITHIN:
            world.found("failures", f"a turn that makes every step fail goes on for {world.steps - since} steps")
            break
    result = world.ended_as.get(bad.number)
    if result not in (EndReason.FAILED, None):
        world.found("failures", f"a turn that makes every step fail ended as {result}")
    world.play()
    computed = world.executor.tokens - began
    failures = world.failures - before
    most = ceil(log2(config.running)) + MAX_FAILURES
    if failures > most * (1 + config.overlap):  # each may void another
        world.found("failures", f"one poisoned turn: {failures} steps failed, {most} would be enough")
    again = world.again - again + (failures + 1) * (2 * config.budget + 2 * config.running)
    if computed > needed + bad.prompt + 40 + again:
        world.found("failures", f"one poisoned turn: {computed} tokens were computed, the others needed {needed}")


def struck(world: Scenario) -> None:
    """Several turns begin together, and steps that pass certain positions of some inputs fail: bisection finds those
    turns, and no turn is cleared before it has passed the position where its step failed."""
    rng, config = world.rng, world.config
    count = rng.randint(2, config.running)
    turns = [world.say(world.opened(), world.text(rng.randint(1, 2 * config.budget)), 8) for _ in range(count)]
    bad = rng.sample(turns, rng.randint(1, min(2, count)))
    for turn in bad:
        turn.poisoned_from = rng.randint(0, turn.prompt)
    before = world.failures
    world.play()
    most = len(bad) * (ceil(log2(count)) + MAX_FAILURES)
    if world.failures - before > most * (1 + config.overlap):  # each may void another
        world.found("failures", f"{len(bad)} of {count} turns: {world.failures - before} steps failed, at most {most}")
    for sid in list(world.naive):
        world.close(sid, finish=False)


def shortened(world: Scenario) -> None:
    """A draft fails twice near its end, is shortened and sent: it then shares steps as if nothing had happened."""
    rng, config = world.rng, world.config
    sid = world.opened()
    text = world.text(config.context // 2)
    world.draft(sid, text)
    for _ in range(2):
        for _ in range(rng.randint(2, 6)):
            world.step()
        world.forced += 1
        for _ in range(2):
            world.step()
    world.draft(sid, text[:4])
    long = world.say(sid, text[:4], min(150, config.context // 2))
    others = [world.say(world.opened(), world.text(3), 4).number for _ in range(3)]
    began = world.steps
    while long.number in world.turns:
        world.step()
        if world.steps - began > ISOLATED_WITHIN and any(number in world.turns for number in others):
            world.found("failures", f"turns {others} wait for a draft that failed before it was shortened")
    world.play()


def tails(world: Scenario) -> None:  # noqa: C901 - one stretch of the story after the other
    """Sessions that share a partly filled page continue from it, are cut back onto it, and continue again."""
    rng, config = world.rng, world.config
    size = config.page_size
    first = world.opened()
    world.append(first, world.text(rng.randint(1, 2 * size)))
    world.play()
    for _ in range(rng.randint(4, 30)):
        sids = [sid for sid, naive in world.naive.items() if naive.turn is None]
        if not sids:
            world.step()
            continue
        sid = rng.choice(sids)
        length, what = len(world.naive[sid].tokens), rng.random()
        if what < 0.25 and len(world.naive) < 6:
            world.fork(sid, position=rng.choice((length, length, rng.randint(0, length))))
        elif what < 0.45 and length + size < world.longest:
            world.append(sid, world.text(rng.randint(1, 1 + size // 2)))
        elif what < 0.65 and length + size < world.longest:
            world.say(sid, world.text(rng.randint(1, 3)), rng.randint(1, 1 + size // 2))
        elif what < 0.85:
            world.rewind(sid, position=rng.randint(max(0, length - size), length))
        elif world.naive[sid].records and world.naive[sid].records[-1][1] < length:
            sampling = Sampling(temperature=1.0, seed=rng.getrandbits(30))
            world.regenerate(sid, TurnParams(max_new_tokens=3, ignore_eos=True, sampling=sampling))
            for _ in range(rng.randint(0, 3)):
                world.step()
            if world.naive[sid].turn is not None:
                world.abort(sid, rng.choice((0, 0, 1)))
        for _ in range(rng.choice((0, 1, 2))):
            world.step()
    world.play()


def cut_back(world: Scenario) -> None:
    """A fork continues in a copy of the page it shares, is cut back onto the shared page, and both continue."""
    rng, size = world.rng, world.config.page_size
    for _ in range(rng.randint(2, 6)):
        parent = world.opened()
        world.append(parent, world.text(rng.randint(2, 2 * size)))
        world.play()
        length = len(world.naive[parent].tokens)
        child = world.fork(parent)
        assert child is not None
        world.say(child, world.text(rng.randint(1, 1 + size // 2)), 1)
        world.play()
        world.rewind(child, position=rng.randint(max(1, length - size // 2), length + 1))
        for _ in range(rng.randint(2, 6)):
            sid = rng.choice((parent, child))
            if len(world.naive[sid].tokens) + size < world.longest:
                world.say(sid, world.text(rng.randint(1, 3)), rng.randint(1, 4))
                world.play()
        for sid in (parent, child):
            world.close(sid, finish=False)


def churn(world: Scenario) -> None:
    """Thousands of sessions and turns come and go beside a few that wait: nothing is forgotten or piles up."""
    rng = world.rng
    keep = [world.opened(ttl=500.0) for _ in range(3)]
    for sid in keep[:2]:
        world.say(sid, world.text(5), 2, timeout=100.0 + rng.random())
    for _ in range(3):
        world.say(world.opened(), world.text(3), 3, queue_timeout=200.0)
    drafts = [world.opened(ttl=500.0)]
    world.draft(drafts[0], world.text(4))
    busy = world.opened(ttl=1e6)
    for number in range(rng.choice((300, 800))):
        world.say(busy, [1], 1, timeout=1e6, queue_timeout=1e6)
        world.abort(busy, None)
        if number % 2 == 0:
            world.close(world.opened(ttl=1e6), finish=False)
    for name, entries in internals.bookkeeping(world.engine).items():
        if entries > (1200 if name == "timers" else 100) + 10 * len(world.naive):
            world.found("bookkeeping", f"{entries} {name} for {len(world.naive)} sessions")
    late = rng.random() < 0.5
    if not late:
        world.play()
    world.clock.advance(rng.choice((41.0, 101.5)))
    world.step()
    world.play()
    world.clock.advance(600.0)
    world.step()


def scored(world: Scenario) -> None:
    """Several turns request log-probabilities of their input; some end while a step computes them, others continue."""
    rng, config = world.rng, world.config
    for _ in range(rng.randint(3, 8)):
        turns = []
        for _ in range(rng.randint(2, config.running)):
            sid = world.opened()
            params = TurnParams(max_new_tokens=rng.choice((1, 5)), ignore_eos=True, input_logprobs=rng.choice((0, 2)))
            turns.append(
                world.submit(sid, world.text(rng.randint(2, min(3 * config.budget, config.context // 2))), params)
            )
        while any(turn is not None and turn.number in world.turns for turn in turns):
            world.step()
            open_turns = [turn for turn in turns if turn is not None and turn.number in world.turns]
            if len(open_turns) > 1 and rng.random() < 0.3:
                world.abort(rng.choice(open_turns[:-1]).session.id, None)
        for sid in list(world.naive):
            world.close(sid, finish=False)


def guessed(world: Scenario) -> None:
    """Tokens are guessed beyond the ends of turns: at stop ids, at the length limit, and at both at once."""
    rng, config = world.rng, world.config
    sids = [world.opened() for _ in range(config.running)]
    for _ in range(rng.randint(10, 30)):
        for sid in sids:
            if world.naive[sid].turn is None and len(world.naive[sid].tokens) + 20 < world.longest:
                params = TurnParams(
                    max_new_tokens=rng.randint(1, 6),
                    sampling=Sampling(temperature=1.0, seed=rng.getrandbits(30)),
                    stop_ids=tuple(rng.sample(range(VOCAB), rng.randint(1, 8))),
                    min_new_tokens=rng.choice((0, 1)),
                )
                world.submit(sid, world.text(rng.randint(1, 4)), params)
        for _ in range(rng.randint(1, 5)):
            world.step()
    world.play()
