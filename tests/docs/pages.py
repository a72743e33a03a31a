"""The pages of the documentation, and the blocks of code in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").glob("*.md")])
PRESENT = [page for page in PAGES if page.name != "CHANGELOG.md"]
"""The pages about the current code."""
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<language>\S*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. `not_run`: the reason in the comment before it, if it is marked as not to be run."""

    page: str
    line: int
    language: str
    text: str
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(*languages: str) -> Iterator[Block]:
    """Returns the blocks of all pages in these languages, or all blocks."""
    for page in PAGES:
        content = page.read_text(encoding="utf-8")
        for found in FENCE.finditer(content):
            if not languages or found["language"] in languages:
                line = content.count("\n", 0, found.start("language")) + 1
                yield Block(name_of(page), line, found["language"], found["text"], found["reason"])


def spans(page: Path) -> list[str]:
    """Returns the inline code of a page, outside its blocks."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    return re.findall(r"`([^`\n]+)`", prose)
