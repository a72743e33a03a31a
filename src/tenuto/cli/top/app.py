"""The terminal's map as an application of Textual."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import ContentSwitcher, Footer, Input, Static

from tenuto.base.errors import TenutoError
from tenuto.base.map_feed import Picture, ShownSession
from tenuto.cli.tables import printable
from tenuto.cli.top import drawing, words
from tenuto.cli.top.listing import Listing
from tenuto.client.map_reader import Action, Event, MapReader
from tenuto.client.map_turns import Turns
from tenuto.client.map_world import World

VIEWS = ("sessions", "turns", "memory")
LOW = 18
"""A terminal with fewer lines shows no units above the sessions."""
ROWS_OF_A_POOL = 6
"""Lines of units of each pool in the view of the memory."""
DONE: dict[Action, str] = {
    "abort": "the turn was rolled back",
    "park": "the session was parked",
    "close": "the session was closed",
}
QUESTIONS: dict[Action, str] = {
    "abort": "Abort the open turn of {}? It is rolled back.",
    "park": "Park {}? Its state leaves the device.",
    "close": "Close {}? Its {} turns are gone then, and an open turn is aborted.",
}


class Ask(ModalScreen[bool]):
    """A question that is answered with yes or no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape", "dismiss(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Static(Text(f"{self._question}\n\ny yes   n no"), classes="box")


class Facts(ModalScreen[None]):
    """All that the map has of a session, at the moment when it was asked for."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter,escape,q", "dismiss(None)", "Back")]

    def __init__(self, name: str, facts: list[tuple[str, str]]) -> None:
        super().__init__()
        self._text = Text(f"{name}\n\n", "bold")
        for title, value in facts:
            self._text.append(f"{title:<10} ", "not bold dim").append(f"{value}\n", "not bold")

    def compose(self) -> ComposeResult:
        yield Static(self._text, classes="box")


class TopApp(App[TenutoError]):
    """The map of a server. It returns the error that ended it, if one did."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    #title { height: 1; background: $panel; }
    #figures, #tiers, #audit { height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    #tiers, #audit { color: $text-muted; }
    #pools { height: auto; max-height: 40%; }
    ContentSwitcher { height: 1fr; }
    Listing { height: 1fr; }
    #find { dock: bottom; display: none; }
    Ask, Facts { align: center middle; }
    .box { width: auto; max-width: 90%; max-height: 90%; border: round $accent; padding: 1 2; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "view('sessions')", "Sessions"),
        Binding("2", "view('turns')", "Turns"),
        Binding("3", "view('memory')", "Memory"),
        Binding("enter", "facts", "Facts"),
        Binding("a", "act('abort')", "Abort"),
        Binding("p", "act('park')", "Park"),
        Binding("c", "act('close')", "Close"),
        Binding("s", "sort", "Sort"),
        Binding("slash", "find", "Find", key_display="/"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, reader: MapReader, first: Event, url: str) -> None:
        super().__init__()
        self._reader = reader
        self._first = first
        self._url = url
        self._world: World | None = None
        self._turns = Turns()
        self._lost = ""  # why the feed is broken; empty: it is live
        self._sort = next(iter(SORTS))

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        yield Static(id="figures")
        yield Static(id="pools")
        yield Static(id="tiers")
        yield Static(id="audit")
        with ContentSwitcher(initial="sessions"):
            yield Listing("sessions", drawing.session_header, self._session_row, "no session is open")
            yield Listing("turns", drawing.turn_header, self._turn_row, "no turn has run since you looked")
            with VerticalScroll(id="memory"), Vertical():
                yield Static(id="grids")
        yield Input(placeholder="part of an id; Enter keeps it, Escape shows all sessions", id="find")
        yield Footer(compact=True)

    @property
    def _base(self) -> Screen[None]:
        """The screen below questions."""
        return self.screen_stack[0]

    def on_mount(self) -> None:
        self._base.query_one("#sessions").focus()
        self.follow()

    @work
    async def follow(self) -> None:
        """Shows every event of the feed, until an error that will not pass."""
        event = self._first
        try:
            while self.is_running:
                self._take(event)
                event = await asyncio.wrap_future(self._reader.next())
        except TenutoError as error:
            self.exit(error)

    def _take(self, event: Event) -> None:
        if isinstance(event, TenutoError):
            self._lost = event.message
        else:
            self._lost = ""
            if self._world is None or isinstance(event, Picture):
                assert isinstance(event, Picture)  # the feed begins with one
                self._world, self._turns = World(event), Turns()
            else:
                self._world.apply(event)
            self._turns.take(self._world, event)
        self._show()

    def on_resize(self) -> None:
        self._show()

    def _show(self) -> None:
        """Shows what is known now, unless the program ends, when parts of the screen are gone."""
        world = self._world
        if world is None or not self.is_running:
            return
        self._show_title(world)
        self._base.query_one("#figures", Static).update(drawing.figures(words.figures(world, self._turns)))
        head, width = world.whole, self.size.width
        pools = [] if self.size.height < LOW else [drawing.pool(pool, width, 1) for pool in world.pools]
        self._base.query_one("#pools", Static).update(Text("\n").join(pools))
        for name, say in (("#tiers", words.tiers), ("#audit", words.auditor)):
            line = self._base.query_one(name, Static)
            line.display = head is not None
            if head is not None:
                line.update(Text(say(world, head)))
        wanted = self._base.query_one("#find", Input).value
        found = [session for session in world.sessions.values() if wanted in session.id]
        key = SORTS[self._sort]
        found.sort(key=lambda session: (key(self, session), -session.since, session.n))
        self._base.query_one("#sessions", Listing).show([session.n for session in found])
        self._base.query_one("#turns", Listing).show(
            [lane.session for lane in self._turns.shown() if wanted in lane.id]
        )
        if self._base.query_one(ContentSwitcher).current == "memory":
            grids = [
                drawing.pool(pool, width - 2, ROWS_OF_A_POOL).append("\n").append_text(drawing.holders(world, index))
                for index, pool in enumerate(world.pools)
            ]
            self._base.query_one("#grids", Static).update(Text("\n\n").join(grids))

    def _show_title(self, world: World) -> None:
        about = world.about
        tenant = f" as {about.tenant}" if about.tenant else ""
        title = Text.assemble((" tenuto top ", "bold"), f"{about.model} at {self._url}{tenant}, by {self._sort}  ")
        if self._lost:
            title.append(f"no connection: {self._lost}", "bold red")
        else:
            title.append("live" if not world.more else "reading", "green")
        self._base.query_one("#title", Static).update(title)

    def _session_row(self, number: int, width: int) -> Text:
        assert self._world is not None
        return drawing.session_row(self._world, self._world.sessions[number], self._turns.lanes.get(number), width)

    def _turn_row(self, number: int, width: int) -> Text:
        assert self._world is not None
        return drawing.turn_row(self._world, self._turns.lanes[number], width)

    def action_view(self, name: str) -> None:
        self._base.query_one(ContentSwitcher).current = name
        self._base.query_one(f"#{name}").focus()
        self._show()

    def action_sort(self) -> None:
        every = list(SORTS)
        self._sort = every[(every.index(self._sort) + 1) % len(every)]
        self._show()

    def action_find(self) -> None:
        box = self._base.query_one("#find", Input)
        box.display = True
        box.focus()

    @on(Input.Changed)
    def found(self) -> None:
        self._show()

    @on(Input.Submitted)
    def keep(self) -> None:
        self._base.query_one("#find").display = False
        self.action_view(self._base.query_one(ContentSwitcher).current or VIEWS[0])

    def key_escape(self) -> None:
        self._base.query_one("#find", Input).value = ""
        self.keep()

    def action_facts(self) -> None:
        session = self._chosen()
        if session is not None and self._world is not None:
            self.push_screen(Facts(printable(session.id), words.facts(self._world, session)))

    @work
    async def action_act(self, action: Action) -> None:
        """Acts on the chosen session after a confirmation."""
        session = self._chosen()
        if session is None:
            self.notify("no session is chosen", severity="warning")
            return
        question = QUESTIONS[action].format(printable(session.id), f"{session.turns:,}")
        if not await self.push_screen_wait(Ask(question)):
            return
        try:
            await asyncio.wrap_future(self._reader.act(action, session))
        except TenutoError as error:
            self.notify(printable(str(error)), severity="error", markup=False)
        else:
            self.notify(f"{printable(session.id)}: {DONE[action]}", markup=False)

    def _chosen(self) -> ShownSession | None:
        current = self._base.query_one(ContentSwitcher).current
        listing = self._base.query_one("#turns" if current == "turns" else "#sessions", Listing)
        return self._world.sessions.get(listing.chosen) if self._world is not None else None

    def rate_of(self, session: ShownSession) -> float:
        """Returns the tokens a second of the session's open turn."""
        lane = self._turns.lanes.get(session.n)
        return lane.rate or 0.0 if lane is not None and session.turn is not None else 0.0

    def units_of(self, session: ShownSession) -> int:
        """Returns the number of units that the session holds."""
        return self._world.units[session.n] if self._world is not None else 0


SORTS: dict[str, Callable[[TopApp, ShownSession], float]] = {
    "state": lambda _, session: words.STATES.index(words.state_of(session)),
    "units": lambda app, session: -app.units_of(session),
    "tokens": lambda _, session: -session.tokens,
    "tokens/s": lambda app, session: -app.rate_of(session),
}
"""What sessions may be sorted by."""
