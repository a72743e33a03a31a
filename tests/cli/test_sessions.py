from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.inside import run_inside
from tests.cli.test_cli import TENUTO, Terminal
from tests.private import open_to_others
from tests.serve.server import Server, serving


@pytest.fixture
def http(witness: Server) -> Iterator[httpx.Client]:
    """A client of a server with two sessions: `one` with two turns, and `two-with-a-rather-long-name` without turns."""
    with witness.client() as client:
        client.post("/v1/sessions", json={"id": "one", "ttl": 300, "metadata": {"made": "by a test"}})
        client.post("/v1/sessions", json={"id": LONG})
        for text in ("hello", "line\nbreak \x1b[31m" + "x" * 99):
            client.post("/v1/sessions/one/append", json={"input": text}).raise_for_status()
        yield client
        for session in client.get("/v1/sessions").json()["data"]:
            client.delete(f"/v1/sessions/{session['id']}")


LONG = "two-with-a-rather-long-name-that-is-still-an-id-of-64-characters"


def sessions(witness: Server, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return run_inside("sessions", *arguments, stdin=stdin, env={"TENUTO_URL": witness.url})


def test_ls_lists_sessions_in_plain_columns(witness: Server, http: httpx.Client) -> None:
    done = sessions(witness, "ls")
    assert (done.returncode, done.stderr) == (0, "")
    header, *lines = done.stdout.splitlines()
    assert header.split() == ["id", "state", "turns", "tokens", "room", "idle", "s", "ttl", "s"]
    assert [line.split()[:3] for line in lines] == [["one", "idle", "2"], [LONG, "idle", "0"]]
    assert {len(line) - len(line.lstrip()) for line in lines} == {0}
    listed = json.loads(sessions(witness, "ls", "--json").stdout)
    assert [session["id"] for session in listed] == ["one", LONG]
    assert listed[0]["metadata"] == {"made": "by a test"}


def test_ls_on_a_terminal_shows_whole_ids(witness: Server, http: httpx.Client) -> None:
    with Terminal([TENUTO, "sessions", "ls", "--url", witness.url]) as terminal:
        terminal.wait_for("state")
        terminal.wait_for(f" {LONG} ")


def test_the_state_of_a_session_includes_its_open_turn(witness: Server, http: httpx.Client) -> None:
    http.put("/v1/sessions/one/draft", json={"input": [1, 2]})
    assert sessions(witness, "ls").stdout.splitlines()[1].split()[:2] == ["one", "drafting"]


def test_show_prints_the_turns_without_control_characters(witness: Server, http: httpx.Client) -> None:
    shown = sessions(witness, "show", "one").stdout
    assert "\x1b" not in shown
    assert "metadata      made by a test\n" in shown
    last = shown.splitlines()[-1]
    assert last.split()[:6] == ["2", "5", "115", "0", "0", "line"]
    assert last.endswith("x...")
    whole = json.loads(sessions(witness, "show", "one", "--json").stdout)
    assert (whole["id"], len(whole["history"]), len(whole["history"][1]["input_tokens"])) == ("one", 2, 115)


def test_fork_prints_an_id_that_the_next_command_accepts(witness: Server, http: httpx.Client) -> None:
    child = sessions(witness, "fork", "one", "--turn", "1").stdout.strip()
    assert json.loads(sessions(witness, "show", child, "--json").stdout)["tokens"] == 5
    assert sessions(witness, "fork", "one", "--id", "named").stdout == "named\n"
    rewound = sessions(witness, "rewind", "named", "--position", "3")
    assert rewound.stdout == "named: 1 turns, 3 tokens, room for 4093\n"
    assert json.loads(sessions(witness, "rewind", "named", "--turn", "0", "--json").stdout)["turns"] == 0
    closed = sessions(witness, "close", child, "named", "--finish")
    assert closed.stdout == f"closed {child}\nclosed named\n"
    assert len(json.loads(sessions(witness, "ls", "--json").stdout)) == 2


@pytest.mark.usefixtures("no_umask")
def test_a_session_can_be_exported_to_a_file_or_a_pipe(witness: Server, http: httpx.Client, tmp_path: Path) -> None:
    file = str(tmp_path / "one.json")
    assert sessions(witness, "export", "one", file).stdout == ""
    assert sessions(witness, "import", file, "--id", "copy").stdout == "copy\n"
    piped = sessions(witness, "export", "one", "-").stdout
    assert piped == Path(file).read_text()
    assert http.delete("/v1/sessions/one").status_code == 204
    assert json.loads(sessions(witness, "import", "-", "--json", stdin=piped).stdout)["tokens"] == 120
    assert http.get("/v1/sessions/one/turns").json() == http.get("/v1/sessions/copy/turns").json()
    damaged = sessions(witness, "import", "-", stdin=piped.replace("by a test", "by another"))
    assert (damaged.returncode, damaged.stdout) == (1, "")
    assert damaged.stderr.startswith("tenuto: the session is damaged")
    for arguments in (["import", str(tmp_path / "none")], ["export", "one", str(tmp_path / "no" / "where")]):
        assert re.fullmatch(
            "tenuto: .* cannot be (read|written): No such file or directory\n", sessions(witness, *arguments).stderr
        )
    assert sessions(witness, "import", "-", stdin="{").stderr.startswith("tenuto: - is not an exported session: ")
    state = str(tmp_path / "state")
    assert sessions(witness, "export", "--state", "copy", state).stdout == ""
    assert not [*open_to_others(tmp_path)]
    again = json.loads(sessions(witness, "import", state, "--id", "again", "--json").stdout)
    assert (again["tokens"], again["computed"]) == (120, 0)  # like the copy, which has had no turn
    Path(state).write_bytes(Path(state).read_bytes()[:-1])
    assert sessions(witness, "import", state).stderr.startswith("tenuto: the file is damaged")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["show", "nobody"], "nobody"),
        (["close", "nobody"], "nobody"),
        (["fork", "one", "--turn", "9"], "allowed: a whole number from 0 to 2"),
        (["rewind", "one"], "turn"),
        (["fork", "one", "--id", "one"], "one"),
        (["show", "a/b"], ""),
        (["ls", "--url", "http://127.0.0.1:9"], "no connection"),
        (["ls", "--url", "nowhere"], "not the address"),
    ],
    ids=str,
)
def test_errors_are_one_line_and_a_status(
    witness: Server, http: httpx.Client, arguments: list[str], complaint: str
) -> None:
    done = sessions(witness, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("tenuto: ")
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_key_is_read_from_the_environment() -> None:
    with serving("--model", "witness", env={"TENUTO_API_KEY": "secret"}) as server:
        command = [TENUTO, "sessions", "ls", "--json", "--url", server.url]
        for key, status in (("secret", 0), ("wrong", 1)):
            environment = {**os.environ, "TENUTO_API_KEY": key}
            assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode == status


def test_help_loads_neither_models_nor_servers() -> None:
    heavy = "{'torch', 'numpy', 'httpx', 'fastapi', 'rich.table'}"
    code = f"import sys, tenuto.cli; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert subprocess.run([TENUTO, "sessions", "rewind", "--help"], capture_output=True, check=False).returncode == 0
