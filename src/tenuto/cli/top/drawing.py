"""Pools, sessions and turns as lines of coloured text."""

from __future__ import annotations

import math
from functools import cache

from rich.cells import set_cell_size
from rich.text import Text

from tenuto.base.map_feed import ShownSession
from tenuto.base.map_views import Phase
from tenuto.cli.tables import printable
from tenuto.cli.top import words
from tenuto.client.map_turns import WINDOW, Lane
from tenuto.client.map_world import Cell, PoolWorld, What, World, count_of

GOLDEN_ANGLE = 137.508
PHASES: dict[Phase, str] = {
    "drafting": "#6b6890",
    "queued": "#7a7670",
    "restoring": "#5ba4d8",
    "sharing": "#4a7896",
    "prefill": "#ee8a5c",
    "decode": "#5fb98f",
    "paused": "#8c8882",
    "preempted": "#a8706c",
}
MARKS = {What.SHARED: ("▞", "#e0e0e0"), What.LIMBO: ("░", "#9a9894"), What.OTHER: ("▪", "#78849a")}
OF_SESSIONS = {What.TURN: "█", What.SESSION: "█", What.CHECKPOINT: "▒", What.CLOSED: "░"}
TEXT = 44
"""The width of what a turn does, in words, which terminals of 80 columns have."""
PARTS = "▁▂▃▄▅▆▇"
"""Parts of pools, by the share of units that are held."""
THIN: frozenset[Phase] = frozenset({"queued", "paused", "preempted"})
"""Phases in which a turn does nothing."""


@cache
def colour(session: int) -> str:
    """Returns the colour of a session, the same as in the browser when that is dark: equal lightness and chroma in
    OKLCH, and hues as far apart as possible.
    Source of the conversion: B. Ottosson, "A perceptual color space for image processing" (2020)."""
    hue = math.radians((28 + session * GOLDEN_ANGLE) % 360)
    lightness, a, b = 0.74 - 0.05 * (session // 24 % 3), 0.115 * math.cos(hue), 0.115 * math.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.707614701 * short,
    )
    return "#" + "".join(f"{_gamma(value):02x}" for value in linear)


def _gamma(value: float) -> int:
    value = min(1.0, max(0.0, value))
    return round(255 * (12.92 * value if value <= 0.0031308 else 1.055 * value ** (1 / 2.4) - 0.055))


def figures(pairs: list[tuple[str, str]]) -> Text:
    """Returns names and values on one line."""
    return Text("  ").join(Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in pairs)


def pool(shown: PoolWorld, width: int, rows: int) -> Text:
    """Returns what a pool is and what its units are, and below it `rows` lines that show all units."""
    about = shown.about
    unit = f"pages of {about.slots} tokens" if about.slots > 1 else "state slots"
    size = f", {words.amount(about.capacity * about.unit_bytes)}" if about.unit_bytes else ""
    title = Text.assemble(
        (about.name, "bold"), f" {about.capacity:,} {unit}{size}: ", no_wrap=True, overflow="ellipsis"
    )
    counts = [(what, count) for what, count in shown.sum().items() if count or what is What.FREE]
    title.append(", ".join(f"{count:,} {words.NAMES[what]}" for what, count in reversed(counts)))
    title.truncate(width, overflow="ellipsis")
    for number, cell in enumerate(shown.cells(width * rows)):
        if number % width == 0:
            title.append("\n")
        title.append_text(_cell(cell))
    return title


def _cell(cell: Cell) -> Text:
    if cell.what is What.FREE:
        return Text("·", "dim")
    if cell.what in OF_SESSIONS:
        mark, style = OF_SESSIONS[cell.what], colour(cell.session)
    else:
        mark, style = MARKS[cell.what]
    return Text(mark if cell.share == 1 else PARTS[int(cell.share * len(PARTS))], style)


SESSION_COLUMNS = (("state", 10), ("units", 9), ("shared", 8), ("tokens", 11), ("tokens/s", 9))


def session_header(width: int) -> Text:
    """Returns the names of the columns of sessions."""
    name = set_cell_size("  session", _name_width(width))
    return Text(name + "".join(f"{title:>{size}}" for title, size in SESSION_COLUMNS), "dim")


def session_row(world: World, session: ShownSession, lane: Lane | None, width: int) -> Text:
    """Returns a session's line."""
    shared = world.shared(session)
    values = (
        words.state_of(session),
        f"{world.units[session.n]:,}",
        f"{shared:,}" if shared else "-",
        f"{session.tokens:,}",
        words.rate(lane.rate if lane is not None and session.turn is not None else None),
    )
    name = set_cell_size(printable(session.id), _name_width(width) - 2)
    line = Text.assemble(("● ", colour(session.n)), name)
    for value, (title, size) in zip(values, SESSION_COLUMNS, strict=True):
        style = PHASES.get(session.turn.phase, "") if title == "state" and session.turn is not None else ""
        line.append(f"{value:>{size}}", style)
    return line


def _name_width(width: int) -> int:
    return max(8, width - sum(size for _, size in SESSION_COLUMNS))


def turn_header(width: int) -> Text:
    """Returns the names of the columns of turns."""
    name, strip = _turn_widths(width)
    text = set_cell_size("  session", name) + set_cell_size(f" {WINDOW:.0f} s ago", strip - 4) + "now  does"
    return Text(set_cell_size(text, width), "dim")


def turn_row(world: World, lane: Lane, width: int) -> Text:
    """Returns what the turns of a session did in the last minute, and what the open one does."""
    name, strip = _turn_widths(width)
    line = Text.assemble(("● ", colour(lane.session)), set_cell_size(printable(lane.id), name - 2), " ")
    for place in range(strip - 2):
        moment = world.now - WINDOW * (strip - 3 - place) / (strip - 2)
        phase = lane.at(moment)
        line.append(" " if phase is None else "─" if phase in THIN else "━", PHASES[phase] if phase is not None else "")
    session = world.sessions.get(lane.session)
    turn = session.turn if session is not None else None
    if turn is None:
        line.append(" ended", "dim")
    else:
        line.append(f" {turn.phase} ", PHASES[turn.phase])
        line.append(words.what_it_does(turn, lane), "dim")
    line.truncate(width, overflow="ellipsis", pad=True)
    return line


def _turn_widths(width: int) -> tuple[int, int]:
    """Returns the widths of a session's name and of what its turns did."""
    name = max(10, min(28, width // 5))
    return name, max(20, min((width - name) // 2, width - name - TEXT))


def holders(world: World, index: int, most: int = 5) -> Text:
    """Returns who holds the most units of a pool."""
    counts = {
        session.n: sum(count_of(ranges) for place, _, ranges in session.held if place == index)
        for session in world.sessions.values()
    }
    line = Text(no_wrap=True, overflow="ellipsis")
    for number, count in sorted(counts.items(), key=lambda each: -each[1])[:most]:
        if count:
            line.append("● ", colour(number)).append(f"{printable(world.sessions[number].id)} {count:,}  ")
    return line or Text("no session holds any", "dim")
