"""The words for sessions, turns and amounts on the terminal's map."""

from __future__ import annotations

from collections import Counter

from tenuto.base.map_feed import ShownSession, ShownTurn, WholeHead
from tenuto.client.map_turns import Lane, Turns
from tenuto.client.map_world import What, World, count_of

STATES = (
    *("decode", "prefill", "restoring", "sharing", "preempted", "paused", "queued", "drafting"),
    *("idle", "parked", "closing", "closed"),
)
"""What a session does, as sorting by state orders it."""
NAMES = {
    What.TURN: "turns",
    What.SESSION: "sessions",
    What.SHARED: "shared",
    What.CHECKPOINT: "checkpoints",
    What.CLOSED: "closed",
    What.OTHER: "other holders",
    What.LIMBO: "in limbo",
    What.FREE: "free",
}


def state_of(session: ShownSession) -> str:
    """Returns one of `STATES`."""
    if session.turn is not None:
        return session.turn.phase
    if session.state != "open":
        return session.state
    return "parked" if session.parked and not session.computed else "idle"


def amount(size: float) -> str:
    """Returns a number of bytes."""
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1000:
            return f"{size:.1f} {unit}" if size < 10 else f"{size:.0f} {unit}"
    return f"{size / 1024:.1f} TiB"


def ago(seconds: float) -> str:
    """Returns a time that has passed."""
    for most, divisor, unit in ((90, 1, "s"), (5400, 60, "min"), (172_800, 3600, "h")):
        if seconds < most:
            return f"{seconds / divisor:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"


def rate(tokens: float | None) -> str:
    """Returns tokens a second."""
    return "-" if tokens is None else f"{tokens:.1f}" if tokens < 100 else f"{tokens:,.0f}"


def figures(world: World, turns: Turns) -> list[tuple[str, str]]:
    """Returns the names and the values of the totals."""
    states = [state_of(session) for session in world.sessions.values()]
    still_open = len(states) - states.count("closed")
    running = sum(state in ("decode", "prefill", "restoring", "sharing") for state in states)
    head = world.whole
    if head is None:
        return [
            ("sessions", f"{still_open:,}"),
            ("running", f"{running:,}"),
            ("waiting", f"{states.count('queued'):,}"),
            ("tokens/s", rate(turns.rate)),
        ]
    return [
        ("memory", f"{100 * world.in_use():.1f}%"),
        ("sessions", f"{still_open:,}"),
        ("running", f"{running:,} of {head.rows:,}"),
        ("waiting", f"{head.queued:,}"),
        ("tokens/s", rate(turns.rate)),
        ("step", f"{1000 * turns.step_seconds:.1f} ms" if turns.step_seconds else "-"),
    ]


def tiers(world: World, head: WholeHead) -> str:
    """Returns where the state of sessions is, and what has moved."""
    used = sum((pool.about.capacity - pool.free) * pool.about.unit_bytes for pool in world.pools)
    there = sum(bool(session.held) for session in world.sessions.values())
    device = f"device {there:,} sessions, {amount(used)}"
    if "host" not in head.tiers:
        return f"{device}; no other tier is configured"
    parked = Counter(session.tier for session in world.sessions.values() if session.parked)
    lower = "; ".join(f"{tier} {parked[tier]:,}, {amount(head.tiers.get(tier, 0))}" for tier in ("host", "disk"))
    down = head.moves.get("host", 0) + head.moves.get("disk", 0)
    return f"{device}; {lower}; units moved down {down:,}, back {head.moves.get('device', 0):,}"


def auditor(world: World, head: WholeHead) -> str:
    """Returns the sum of all units, as the auditor checks it."""
    capacity = sum(pool.about.capacity for pool in world.pools)
    free = sum(pool.free for pool in world.pools)
    limbo = sum(count_of(pool.limbo) for pool in world.pools)
    text = f"{capacity - free - limbo:,} leased + {limbo:,} in limbo + {free:,} free = {capacity:,} units"
    if head.audit is None:
        return f"{text}; not recounted yet"
    return f"{text}; recounted {ago(head.audit.age)} ago, {head.audit.holders:,} holders"


def what_it_does(turn: ShownTurn, lane: Lane | None) -> str:
    """Returns what a turn does, with its reason or its progress."""
    if turn.phase == "decode":
        tokens = f"{turn.output:,} of {turn.limit:,}"
        return f"{tokens}, {rate(lane.rate)}/s" if lane is not None and lane.rate is not None else tokens
    if turn.phase == "prefill" and not turn.why:
        return f"{turn.computed:,} of {turn.prompt:,}"
    return turn.why


def facts(world: World, session: ShownSession) -> list[tuple[str, str]]:
    """Returns what is known of a session."""
    turn, parent, shared = session.turn, world.sessions.get(session.parent or 0), world.shared(session)
    units = world.units[session.n]
    found = [
        ("state", state_of(session)),
        ("tenant", session.tenant if world.about.tenant is not None else ""),
        ("tokens", f"{session.tokens:,} in {session.turns:,} turns"),
        ("in memory", f"{session.computed:,} tokens" if session.computed else "nothing"),
        *(
            (pool.about.name, f"{count:,} units")
            for index, pool in enumerate(world.pools)
            if (count := sum(count_of(ranges) for place, _, ranges in session.held if place == index))
        ),
        ("shared", f"{shared:,} of {units:,} units" if shared else ""),
        ("parked", f"{session.parked:,} tokens, {session.tier}" if session.parked else ""),
        ("saved", f"{session.saved:,} tokens on disk" if session.saved else ""),
        ("forked", f"{parent.id} at {session.forked:,}" if parent is not None else ""),
        ("turn", ": ".join(filter(None, (turn.phase, turn.why))) if turn is not None else ""),
        ("output", f"{turn.output:,} of at most {turn.limit:,} tokens" if turn is not None else ""),
        ("cached", f"{turn.cached:,} of {turn.prompt:,} tokens" if turn is not None and turn.cached >= 0 else ""),
        ("idle for", ago(world.now - session.since) if turn is None else ""),
        ("version", str(session.version)),
        ("pinned", "yes" if session.pinned else ""),
    ]
    return [(name, value) for name, value in found if value]
