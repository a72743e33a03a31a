"""Pages name only existing paths, commands, flags, routes, metrics and options, and some pages list all of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.main import get_command

import tenuto
from tenuto.base.options import OPTIONS
from tenuto.cli import app
from tenuto.cli.options import SERVER
from tenuto.cli.settings import ServerSettings
from tenuto.serve.native import session_socket
from tenuto.serve.openai import realtime_socket
from tests.cli.inside import run_inside
from tests.docs.pages import PAGES, PRESENT, ROOT, blocks, name_of, spans
from tests.serve.server import Server

CODE_PAGES = ("architecture", "CONTRIBUTING")
PATH = re.compile(r"(?:src/tenuto|tests|docs|bench|examples|\.ci|\.github)/[\w./*-]*\w/?")
NAME = re.compile(r"(?!\w+\.md)(?:[A-Z]\w*[a-z]\w*|[A-Z][A-Z_]{3,})(?:\.\w+)*")
"""Classes and constants, and what is in them."""
DEFINITIONS = (r"\b(?:class|def|struct) (\w+)", r"^\s*(\w+)(?:: [^=\n]+)? = ", r"^\s+(\w+): ", r"self\.(\w+)")
ABOUT_THE_CODE = [page for page in PRESENT if page.parent.name == "internals" or page.stem in CODE_PAGES]
PLACES = {"ID": "{session_id}", "TURN": "{turn_id}", "RESPONSE": "{response_id}", "CHAT": "{completion_id}"}
"""The form in which pages write the parameters of routes."""


@cache
def helped(*command: str) -> str:
    """Returns the help of a command of `tenuto`."""
    return run_inside(*command, "--help").stdout


def commands() -> list[str]:
    return re.findall(r"^  ([a-z]+) ", helped().partition("Commands:")[2], re.MULTILINE)


@pytest.mark.parametrize("page", PRESENT, ids=name_of)
def test_a_path_on_a_page_exists(page: Path) -> None:
    named = {found.rstrip("/") for found in PATH.findall(page.read_text(encoding="utf-8"))}
    named |= {span for span in spans(page) if re.fullmatch(r"[A-Z]+\.md", span)}
    missing = [name for name in named if not any([*ROOT.glob(name)])]
    assert not missing


@pytest.mark.parametrize("page", PRESENT, ids=name_of)
def test_a_link_on_a_page_leads_somewhere(page: Path) -> None:
    """Including pages that are not on the site; `make docs` checks anchors on the site."""
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", page.read_text(encoding="utf-8"))
    assert not [target for target in targets if "://" not in target and not (page.parent / target).exists()]


def test_pages_name_only_existing_commands_targets_and_modules() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    texts = [block.text for block in blocks("sh")] + [span for page in PRESENT for span in spans(page)]
    found = commands()
    for text in texts:
        for target in re.findall(r"(?:^|\n)make ([a-z-]+)", text):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
        for command in re.findall(r"(?:^|[\s/])tenuto ([a-z]+)\b", text):
            assert command in found
        for module in re.findall(r"python3? -m ((?:bench|tests)[\w.]*)", text):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def flags_of(command: Any) -> Iterator[str]:
    """Returns the flags of a command and of its subcommands, including hidden ones."""
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for inner in getattr(command, "commands", {}).values():
        yield from flags_of(inner)


@cache
def known_flags() -> frozenset[str]:
    """Returns the flags of all commands, and those spelled out in the sources of programs."""
    sources = [*(ROOT / "src" / "tenuto" / "cli").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]
    sources += (ROOT / "tests" / "sim").glob("*.py")
    spelled = (found for file in sources for found in re.findall(r"\"(--[a-z][a-z-]+)", file.read_text("utf-8")))
    return frozenset({*flags_of(get_command(app)), *spelled, "--help"})


@pytest.mark.parametrize("page", PRESENT, ids=name_of)
def test_a_flag_on_a_page_exists(page: Path) -> None:
    shells = [block.text for block in blocks("sh") if block.page == name_of(page)]
    named = {flag for text in [*spans(page), *shells] for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)}
    assert not named - known_flags() - {"--mamba-"}


def default(written: str) -> Any:
    """Returns the value that a page gives as a default."""
    if found := re.fullmatch(r"(\d+) (MiB|GiB)", written):
        return int(found[1]) * (2**20 if found[2] == "MiB" else 2**30)
    known: dict[str, Any] = {"on": True, "off": False, "none": None}
    text = written.strip("`")
    return known[text] if text in known else float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else text


def test_the_operations_page_lists_every_option_of_the_server_with_its_default() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    section = page.partition("### Options of the server")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(--[a-z0-9-]+)` \| ([^|]+) \|", section, re.MULTILINE))
    declared = {option.flag: option.declared.default for option in SERVER.values()}
    assert rows.keys() == declared.keys()
    assert {flag: default(written) for flag, written in rows.items()} == {
        flag: value if value not in ("", ()) else None for flag, value in declared.items()
    }


def test_the_settings_file_on_the_operations_page_is_valid(tmp_path: Path) -> None:
    (example,) = [block for block in blocks("toml") if "# tenuto.toml" in block.text]
    path = tmp_path / "tenuto.toml"
    path.write_text(example.text)
    settings = ServerSettings.resolve({}, path)
    assert settings.serve.served_model_name == ("smollm2", "small")
    assert settings.worker.memory == 4 * 2**30


def test_the_sessions_page_lists_every_option_of_a_turn() -> None:
    page = (ROOT / "docs" / "sessions.md").read_text(encoding="utf-8")
    section = page.partition("### Options of a turn")[2].partition("\n### ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section, re.MULTILINE))
    assert rows.keys() == OPTIONS.keys()
    for name, written in rows.items():
        default = OPTIONS[name].default
        if re.fullmatch(r"[\d.]+", written):
            assert float(written) == default, name
        else:
            assert (
                written.strip() == "true" if default is True else default in (None, (), False, "") or name == "seed"
            ), name


@cache
def defined() -> frozenset[str]:
    """The names of all classes, functions, constants and attributes."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.h"), *(ROOT / "tests").rglob("*.py")]
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return frozenset(name for kind in DEFINITIONS for name in re.findall(kind, source, re.MULTILINE))


@pytest.mark.parametrize("page", ABOUT_THE_CODE, ids=name_of)
def test_a_class_function_or_constant_on_a_page_about_the_code_exists(page: Path) -> None:
    named = {part for span in spans(page) if NAME.fullmatch(span) for part in span.split(".")}
    assert not named - defined()


@pytest.fixture(scope="module")
def described(witness: Server) -> tuple[set[str], set[str]]:
    """Returns the routes of a server, and its metrics."""
    sockets = {route.path for part in (session_socket, realtime_socket) for route in part.router.routes}
    routes = (
        set(httpx.get(f"{witness.url}/openapi.json", timeout=60).json()["paths"]) | {"/docs", "/openapi.json"} | sockets
    )
    metrics = httpx.get(f"{witness.url}/metrics", timeout=60).text
    return routes, set(re.findall(r"^# TYPE (tenuto_\w+)", metrics, re.MULTILINE))


@pytest.mark.parametrize("page", PRESENT, ids=name_of)
def test_a_route_on_a_page_exists(page: Path, described: tuple[set[str], set[str]]) -> None:
    of_chats = {"/fork", "/rewind", "/regenerate", "/switch", "/memory", "/help"}
    for span in spans(page):
        found = re.fullmatch(r"(?:(?:GET|POST|PUT|DELETE) )?(/[\w/]+)(?:\?.*)?", span)
        if found and found[1] not in of_chats:
            route = "/".join(PLACES.get(part, part) for part in found[1].split("/"))
            assert route in described[0] or any(known.startswith(f"{route}/") for known in described[0]), span


@pytest.mark.parametrize("page", PRESENT, ids=name_of)
def test_a_metric_on_a_page_exists(page: Path, described: tuple[set[str], set[str]]) -> None:
    assert {span for span in spans(page) if re.fullmatch(r"tenuto_\w+", span)} <= described[1]


def test_the_reference_lists_every_public_name() -> None:
    named = set(re.findall(r"^::: tenuto\.(\w+)$", (ROOT / "docs" / "reference.md").read_text("utf-8"), re.MULTILINE))
    assert set(dir(tenuto)) - {"TenutoError", "errors"} == named  # `tenuto.base.errors` has these


def test_every_page_is_linked_from_the_readme_or_the_index() -> None:
    linked = {ROOT / target for target in re.findall(r"\]\(([\w./-]+)", (ROOT / "README.md").read_text("utf-8"))}
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    linked |= {ROOT / "docs" / target for target in re.findall(r"\]\(([\w./-]+)", index)}
    apart = {ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "tests" / "README.md"}
    assert {page for page in PAGES if page not in linked} == apart & set(PAGES)
