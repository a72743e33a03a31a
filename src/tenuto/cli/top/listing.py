"""A list of which one line is chosen. It draws only the lines that are seen, so it may have any number."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.widget import Widget

Draw = Callable[[int, int], Text]
"""Returns the line of the session with the number given first, with the width given second."""


class Listing(Widget, can_focus=True):
    """Lines of sessions below a header. `chosen`: the number of the session on the chosen line, or 0 without lines. It
    stays chosen wherever its line moves."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home", "end(0)", show=False),
        Binding("end", "end(-1)", show=False),
    ]

    def __init__(self, id: str, header: Callable[[int], Text], draw: Draw, empty: str) -> None:  # noqa: A002 - as Widget
        super().__init__(id=id)
        self.chosen = 0
        self._header = header
        self._draw = draw
        self._empty = empty
        self._numbers: list[int] = []
        self._top = 0

    def show(self, numbers: list[int]) -> None:
        """Shows these sessions, in this order."""
        place = self._place
        self._numbers = numbers
        if self.chosen not in numbers:  # its place goes to the next one
            self.chosen = numbers[min(place, len(numbers) - 1)] if numbers else 0
        self.refresh()

    @property
    def _place(self) -> int:
        return self._numbers.index(self.chosen) if self.chosen in self._numbers else 0

    @property
    def _rows(self) -> int:
        return max(1, self.size.height - 1)

    def action_move(self, lines: int) -> None:
        if self._numbers:
            self.chosen = self._numbers[min(max(0, self._place + lines), len(self._numbers) - 1)]
            self.refresh()

    def action_page(self, pages: int) -> None:
        self.action_move(pages * self._rows)

    def action_end(self, place: int) -> None:
        if self._numbers:
            self.chosen = self._numbers[place]
            self.refresh()

    def on_click(self, event: events.Click) -> None:
        place = self._top + event.y - 1
        if event.y > 0 and place < len(self._numbers):
            self.chosen = self._numbers[place]
            self.refresh()

    def on_mouse_scroll_down(self) -> None:
        self.action_move(3)

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-3)

    def render(self) -> Text:
        width, rows, place = self.size.width, self._rows, self._place
        self._top = max(0, min(self._top, place, len(self._numbers) - rows), place - rows + 1)
        text = Text(no_wrap=True).append_text(self._header(width))
        for number in self._numbers[self._top : self._top + rows]:
            line = self._draw(number, width)
            if number == self.chosen:
                line.stylize("reverse" if self.has_focus else "underline")
            text.append("\n").append_text(line)
        if not self._numbers:
            text.append(f"\n{self._empty}", "dim")
        return text
