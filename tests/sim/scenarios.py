"""Worlds with a purpose: what a turn costs where memory is ample, what failing steps cost the healthy, who yields to
whom. Each draws its sizes from its seed; `World` and `Watch` check all they check in random worlds too."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from random import Random

from tenuto.base.groups import GroupSpec, Kind
from tenuto.base.options import TurnParams
from tenuto.base.plan import Plan
from tenuto.base.sampling import Sampling
from tenuto.base.turns import EndReason
from tenuto.memory.memory import Shape
from tenuto.session.session import Policy
from tests.sim import internals
from tests.sim.mirror import MirroredWorld
from tests.sim.naive import VOCAB, NaiveTurn
from tests.sim.setting import MIXES, WorldConfig, engine_config, least_units
from tests.sim.sharing import TENANTS, WEIGHTS, sharing

THRASHING = 1.75
"""Turns that outgrow memory compute at most so many times what they need; without pressure it is once."""
ISOLATED_WITHIN = 60
"""Steps from its first failure until a turn that makes steps fail has ended."""


class Scenario(MirroredWorld):
    """One story after the other until so many steps are done."""

    def __init__(self, config: WorldConfig, ignored: Collection[str] = ()) -> None:
        super().__init__(config, ignored)
        self.forced = 0  # steps that fail before others do
        self.rows = 0  # used when the last plan was made
        self.given: dict[int, int] = {}  # tokens that it computes, by the number of the turn
        self._story: Callable[[Scenario], None] = STORIES[(config.seed // EVERY) % len(STORIES)]

    def run(self, steps: int) -> None:
        while self.steps < steps:
            self._story(self)
            self._clear()
            if self._story is churn:  # thousands of operations for a few steps: once is enough
                self._story = tails

    def _clear(self) -> None:
        for sid in list(self.naive):
            if sid in self.naive:
                self.close(sid, finish=False)
        self.step()
        self.step()
        self.step()

    def step_fails(self, members: list[int]) -> bool:
        if self.forced:
            self.forced -= 1
            return True
        return super().step_fails(members)

    def planned(self, plan: Plan) -> list[int]:
        numbers = super().planned(plan)
        self.rows, self.given = len(self.engine.batch), dict(zip(numbers, plan.counts.tolist(), strict=True))
        return numbers

    # -- for stories

    def text(self, tokens: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(tokens)]

    def say(self, sid: str, tokens: list[int], most: int, **params: object) -> NaiveTurn:
        """A turn of exactly `most` tokens; its input is cut to what fits."""
        tokens = tokens[: max(1, self.longest - len(self.naive[sid].tokens) - most)]
        seed = Sampling(temperature=1.0, seed=self.rng.getrandbits(30))
        given = TurnParams(max_new_tokens=most, ignore_eos=True, sampling=seed, **params)  # type: ignore[arg-type]
        turn = self.submit(sid, tokens, given)
        assert turn is not None
        return self.turns[turn.number]

    def opened(self, **policy: object) -> str:
        sid = self.open(Policy(**policy))  # type: ignore[arg-type]
        assert sid is not None
        return sid

    def told(self, tokens: int, most: int = 1) -> str:
        """A session with a history in memory."""
        sid = self.opened()
        self.say(sid, self.text(tokens), most)
        self.play()
        return sid

    def play(self, most: int = 4000) -> int:
        """Until every submitted turn has ended: the steps that took."""
        began = self.steps
        while any(not turn.drafting for turn in self.turns.values()):
            self.step()
            assert self.steps - began < most, "it does not end"
        return self.steps - began


def typing(world: Scenario) -> None:
    """A draft is typed on while it is computed: no token is computed twice, and sending it computes nothing again."""
    rng, config = world.rng, world.config
    sid = world.told(rng.randint(1, 40))
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
        world.found("kept memory", f"rewound to where a turn began: {left} tokens are in memory, {had} were")


def editing(world: Scenario) -> None:
    """A draft is changed in the middle: what comes before the change is not computed again, but for the tokens behind a
    checkpoint or a window."""
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
        world.found("typing", f"{naive.computed} tokens were computed for a draft; its changes gave {given}")


def failing(world: Scenario) -> None:
    """A few steps fail: it costs those few steps, and nobody is computed again or held up for long."""
    rng, config = world.rng, world.config
    turns = [
        world.say(world.opened(), world.text(rng.randint(1, 30)), rng.randint(20, 60)) for _ in range(config.running)
    ]
    needed = sum(turn.prompt + turn.most - 1 for turn in turns)
    longest = (
        max(turn.most for turn in turns) + sum(len(turn.input) for turn in turns) // config.budget + config.running
    )
    began, failures = world.executor.tokens, rng.randint(1, 4)
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
    again = 2 * config.budget + 2 * config.running
    if any(group.kind is Kind.STATE for group in config.groups):  # a turn may go back to its checkpoint
        again += sum(turn.prompt + turn.most for turn in turns) // 2
    if computed > needed + (failures + 1) * again:
        world.found("failures", f"{failures} failed steps: {computed} tokens were computed, {needed} needed")
    if steps > longest + ISOLATED_WITHIN * 2:
        world.found("failures", f"{failures} failed steps: it took {steps} steps, {longest} would do")


def poisoned(world: Scenario) -> None:
    """Every step with one certain turn fails: it ends as failed soon, and the others hardly notice."""
    rng, config = world.rng, world.config
    count = max(1, config.running - 1)
    turns = [world.say(world.opened(), world.text(rng.randint(1, 30)), rng.randint(30, 80)) for _ in range(count)]
    needed = sum(turn.prompt + turn.most - 1 for turn in turns)
    began = world.executor.tokens
    for _ in range(rng.randint(0, 20)):
        world.step()
    bad = world.say(world.opened(), world.text(rng.randint(1, 30)), 30)
    bad.poisoned_from = rng.choice((-1, bad.prompt - 1, bad.prompt + 8))
    before, since = world.failures, None
    while bad.number in world.turns:
        world.step()
        since = world.steps if since is None and world.failures > before else since
        if since is not None and world.steps - since > ISOLATED_WITHIN:
            world.found("failures", f"a turn with which every step fails goes on for {world.steps - since} steps")
            break
    result = world.ended_as.get(bad.number)
    if result not in (EndReason.FAILED, None):
        world.found("failures", f"a turn with which every step fails ended as {result}")
    world.play()
    computed = world.executor.tokens - began
    failures = world.failures - before
    if computed > needed + bad.prompt + 40 + (failures + 1) * (2 * config.budget + 2 * config.running):
        world.found("failures", f"one poisoned turn: {computed} tokens were computed, the others needed {needed}")


def shortened(world: Scenario) -> None:
    """A draft fails twice far along, is shortened and sent: it shares its steps as if nothing had happened."""
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
    for _ in range(3):
        world.say(world.opened(), world.text(3), 4)
    while long.number in world.turns:
        world.step()
    world.play()


def outgrow(world: Scenario) -> None:
    """Turns decode until they outgrow memory; some yield, and what is computed again stays within bounds."""
    rng, config = world.rng, world.config
    for _ in range(rng.choice((0, 0, 4))):
        world.told(rng.randint(4, 30))
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
    """Many forks of one session beside others that share nothing; then somebody needs room."""
    rng, config = world.rng, world.config
    parent = world.told(rng.randint(config.context // 4, config.context // 2))
    for _ in range(rng.randint(0, 4)):
        world.told(rng.randint(8, config.context // 3))
    forks = []
    for _ in range(rng.randint(2, 12)):
        child = world.fork(parent)
        if child is not None:
            forks.append(child)
    world.step()
    for _ in range(rng.randint(0, 3)):
        world.told(rng.randint(8, config.context // 3))
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


def alone(world: Scenario) -> None:
    """One session in pools that barely hold it: it goes on from its own memory."""
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
    """A turn of higher priority comes that does not fit: nobody below it yields for nothing."""
    rng, config = world.rng, world.config
    size, pool = config.page_size, config.units[0]
    if rng.random() < 0.6:
        rng.choice((refused, exact, unwanted))(world)
        return
    world.say(world.opened(), world.text(pool * size // 2), pool * size // 4, priority=2)
    for _ in range(rng.randint(1, 30)):
        world.step()
    for _ in range(rng.randint(1, 2)):
        world.say(world.opened(), world.text(rng.randint(1, pool * size // 6)), pool * size // 8)
    for _ in range(rng.randint(1, 30)):
        world.step()
    if (sid := world.open(Policy())) is not None:
        world.say(sid, world.text(rng.randint(1, pool * size * 3 // 4)), 1, priority=1)
    world.play()


def refused(world: Scenario) -> None:
    """A turn does not fit beside two that run; one of them ends, and it fits if idle sessions yield."""
    rng, slots = world.rng, world.config.page_size * world.config.units[0]
    for _ in range(rng.randint(3, 6)):
        world.told(slots // 20)
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
    """A fork's turn comes that needs just what is free, or a page more or less, and could have it all in one step; its
    first page is a copy."""
    rng, config = world.rng, world.config
    size = config.page_size
    parent = world.told(size * rng.randint(1, 3) + rng.randint(1, size), 2)
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
    """Sessions fill memory, and a draft comes that nobody waits for: none of them yields to it. When they are gone, one
    that is dropped is computed again."""
    rng, slots = world.rng, world.config.page_size * world.config.units[0]
    told = [world.told(slots // 7) for _ in range(rng.randint(4, 7))]
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
    world.engine.drop(sid, **world.own(sid))
    for _ in range(4 + slots // 8):
        world.step()
        if world.engine.idle:
            break


def tails(world: Scenario) -> None:  # noqa: C901 - one stretch of the story after the other
    """Sessions that share a partly filled page go on from it, are cut back onto it, and go on again."""
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


def churn(world: Scenario) -> None:
    """Sessions and turns come and go by the thousand beside a few that wait: nothing is forgotten or piles up."""
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


EVERY = 4
"""Every so manieth world is a scenario."""
STORIES: tuple[Callable[[Scenario], None], ...] = (
    typing,
    tails,
    poisoned,
    families,
    outgrow,
    churn,
    sharing,
    failing,
    alone,
    promotion,
    editing,
    shortened,
)


def is_scenario(seed: int) -> bool:
    return seed % EVERY == EVERY - 1


def scenario_world(seed: int) -> WorldConfig:
    """The setting of a scenario: memory is ample or tight as its story asks."""
    rng = Random(seed)
    story = STORIES[(seed // EVERY) % len(STORIES)]
    ample = story in (tails, typing, editing, failing, poisoned, shortened, churn, sharing)
    pages_only = story in (outgrow, promotion, alone)
    mix = (Kind.FULL,) if pages_only and rng.random() < 0.7 else rng.choice(MIXES)
    page_size = rng.choice((1, 2, 4, 4, 8)) if story is not tails else rng.choice((3, 4, 8, 16, 32, 64))
    running = rng.choice((4, 8, 12)) if story is not alone else 1
    context = rng.choice((200, 400)) if story is not alone else rng.choice((40, 80))
    config = WorldConfig(
        seed=seed,
        story=story.__name__,
        groups=tuple(GroupSpec(kind, 1, rng.choice((4, 10, 30)) if kind is Kind.SLIDING else 0) for kind in mix),
        pressure="ample" if ample else "tight",
        overlap=rng.randint(0, 1),
        lookahead=0,
        page_size=page_size,
        context=context,
        budget=running + rng.choice((8, 16, 50)),
        running=running,
        sessions=40,
        queued=40,
        units=(),
        checkpoint_share=1.0 if ample else rng.choice((0.2, 0.5, 1.0)),
        interval=rng.choice((16, 64, 10**6)),
        aging=5.0,
        fail_rate=0.0,
        recount_every=2,
        look=0.3,
    )
    if story is sharing:
        weights = tuple((tenant, rng.choice(WEIGHTS)) for tenant in TENANTS) if rng.random() < 0.5 else ()
        running = 16 if weights else rng.choice((1, 2, 4, 8))  # a tenant's share is a row at least
        config = replace(config, running=running, weights=weights, budget=running + rng.choice((24, 60)))
        config = replace(config, sessions=80, interval=10**6)
    shape = Shape.of(engine_config(config), page_size)
    least = [least_units(group, page_size, context, shape) for group in config.groups]
    if ample:
        units = [200 if g.kind is Kind.STATE else n * (running + 8) for g, n in zip(config.groups, least, strict=True)]
    elif story is alone:
        units = [n + rng.choice((0, 0, 1)) for n in least]
    else:
        times = rng.choice((1.2, 2.0, 3.0))
        units = [max(n + 2, int(n * times)) for n in least]
    return replace(config, units=tuple(units))
