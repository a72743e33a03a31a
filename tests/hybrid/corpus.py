"""The training texts of the small hybrid: Python's documentation, as conversations about it."""

import ast
import inspect
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics
from random import Random

Conversation = list[tuple[str, str]]
"""Questions and answers."""

_LONGEST = 600
_LEFT_OUT = {"test", "tests", "idlelib", "site-packages", "lib2to3", "turtledemo", "__pycache__", "pydoc_data"}
_ASKED = ("What does {name} do?", "Tell me about {name}.", "What is {name}?", "Explain {name}, please.")
_ON = ("Go on.", "Please go on.", "And then?", "Tell me more.")


def conversations(rng: Random) -> Iterator[Conversation]:
    """Returns conversations in random order, each about a topic of the language reference or a module of the
    library."""
    found = [*_topics(rng), *_modules(rng)]
    rng.shuffle(found)
    yield from found


def _topics(rng: Random) -> Iterator[Conversation]:
    for name, text in sorted(topics.topics.items()):
        parts = _paragraphs(text)
        for first in range(0, len(parts), 4):
            some = parts[first : first + 4]
            asked = [rng.choice(_ASKED).format(name=name.lower()), *(rng.choice(_ON) for _ in some[1:])]
            yield list(zip(asked, some, strict=True))


def _modules(rng: Random) -> Iterator[Conversation]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).with_suffix("").parts
        if _LEFT_OUT.isdisjoint(parts):
            module = ".".join(part for part in parts if part != "__init__")
            documented = list(_documented(module, file.read_text(encoding="utf-8", errors="replace")))
            for first in range(0, len(documented), 4):
                yield [(rng.choice(_ASKED).format(name=name), text) for name, text in documented[first : first + 4]]


def _documented(module: str, source: str) -> Iterator[tuple[str, str]]:
    """Yields names, with the first paragraph of their documentation."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # sources that are wrong on purpose
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            parts = _paragraphs(ast.get_docstring(node) or "")
            if parts:
                yield (module if isinstance(node, ast.Module) else f"{module}.{node.name}"), parts[0]


def _paragraphs(text: str) -> list[str]:
    """Returns the prose paragraphs, each on one line."""
    found = []
    for part in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        line = " ".join(part.split())
        letters = sum(letter.isalpha() or letter == " " for letter in line)
        if 25 <= len(line) <= _LONGEST and letters > 0.85 * len(line) and line.endswith((".", ":")):
            found.append(line)
    return found
