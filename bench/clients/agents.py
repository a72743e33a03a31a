"""Coding agents: each reads a file with a tool call, answers, and continues the conversation. Of those that name their
conversation, nearly all tokens of earlier requests must be reused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bench.clients.caller import ANSWER, CONTEXT, write_caller
from bench.clients.fetching import Fetched, call
from bench.clients.recording import Recording, recording
from bench.server import server

NOTE = "note 4711 of the day"
REQUESTS = 3
"""The least number of requests of a conversation: a question, the result of a tool, and another question."""
MODELS = ("claude-sonnet-4-5", "claude-opus-5")
"""Model names for which Claude Code writes its requests differently: with the second, it sends system messages within
the conversation."""


def claude_code(fetched: Fetched, place: Path) -> str:
    """Runs Anthropic's agent, from npm. Returns its version. Its prompts have 50,000 bytes, and as many tokens here."""
    programs, version = fetched.npm("@anthropic-ai/claude-code")
    note = place / "project" / "note.txt"
    _write(note)
    caller = write_caller(place / "model", "Read", {"file_path": str(note)})
    with server(str(caller), CONTEXT, "--any-model-name") as running:
        env = _environment(place) | {
            "ANTHROPIC_API_KEY": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_TELEMETRY": "1",
        }
        for model in MODELS:
            with recording(running.url) as record:
                _ask_claude(programs, model, note.parent, env | {"ANTHROPIC_BASE_URL": record.url})
            _show(record)
    return version


def _ask_claude(programs: Path, model: str, project: Path, env: dict[str, str]) -> None:
    command = [str(programs / "claude"), "--model", model, "--output-format", "stream-json", "--verbose"]
    events = _events(call([*command, "-p", "What is in note.txt?"], project, env))
    _expect(NOTE in _text_of(events, "user"), "the file's text is in no tool result", events)
    _expect(events[-1]["result"] == ANSWER, "the answer is not the model's", events)
    events = _events(call([*command, "--continue", "-p", "And now?"], project, env))
    _expect(events[-1]["result"] == ANSWER, "the second answer is not the model's", events)


def codex(fetched: Fetched, place: Path) -> str:
    """Runs OpenAI's agent, from npm. Returns its version."""
    programs, version = fetched.npm("@openai/codex")
    note = place / "project" / "note.txt"
    _write(note)
    caller = write_caller(place / "model", "exec_command", {"cmd": f"cat '{note}'"})
    with server(str(caller), CONTEXT, "--any-model-name") as running, recording(running.url) as record:
        home = place / "codex"
        home.mkdir()
        (home / "config.toml").write_text(CODEX.format(url=record.url))
        env = _environment(place) | {"CODEX_HOME": str(home), "TENUTO_KEY": "none"}
        # Its sandbox does not work on every machine; the only command it runs is ours.
        options = ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "gpt-x"]
        for start in (["exec", *options, "What is in note.txt?"], ["exec", "resume", "--last", *options, "And now?"]):
            events = _events(call([str(programs / "codex"), *start], note.parent, env))
            items = [event["item"] for event in events if event["type"] == "item.completed"]
            _expect(any(item.get("text") == ANSWER for item in items), "no answer is the model's", events)
            if start[1] != "resume":
                _expect(NOTE in _text_of(events, "item.completed"), "the file's text is in no item", events)
    _show(record)
    return version


def opencode(fetched: Fetched, place: Path) -> str:
    """Runs OpenCode, from npm, over OpenAI's chat interface. Returns its version."""
    record, version = record_opencode(fetched, place)
    _show(record)
    return version


def record_opencode(fetched: Fetched, place: Path) -> tuple[Recording, str]:
    """Runs OpenCode. Returns its requests and its version."""
    programs, version = fetched.npm("opencode-ai")
    note = place / "project" / "note.txt"
    _write(note)
    caller = write_caller(place / "model", "read", {"filePath": str(note)})
    with server(str(caller), CONTEXT, "--any-model-name") as running, recording(running.url) as record:
        (note.parent / "opencode.json").write_text(json.dumps(_opencode_settings(record.url)))
        quiet = ("AUTOUPDATE", "LSP_DOWNLOAD", "MODELS_FETCH")
        env = _environment(place) | {f"OPENCODE_DISABLE_{name}": "1" for name in quiet}
        for more in (["What is in note.txt?"], ["--continue", "And now?"]):
            command = [str(programs / "opencode"), "run", "--format", "json", *more]
            events = _events(call(command, note.parent, env))
            _expect(any(event["part"].get("text") == ANSWER for event in events), "no answer is the model's", events)
            if len(more) == 1:
                _expect(NOTE in _text_of(events, "tool_use"), "the file's text is in no tool result", events)
    return record, version


def _opencode_settings(url: str) -> dict[str, Any]:
    """Returns the settings of a project that uses the server."""
    models = {"gpt-x": {"name": "gpt-x", "tool_call": True, "limit": {"context": CONTEXT, "output": 1000}}}
    options = {"baseURL": f"{url}/v1", "apiKey": "none"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "Tenuto", "options": options, "models": models}
    chosen = {"model": "tenuto/gpt-x", "small_model": "tenuto/gpt-x", "autoupdate": False, "share": "disabled"}
    return {**chosen, "provider": {"tenuto": provider}}


def aider(fetched: Fetched, place: Path) -> str:
    """Runs aider, from PyPI, which edits a file by text in the answer, twice. Returns its version."""
    python, version = fetched.python("aider", ("aider-chat",))
    note = place / "project" / "note.txt"
    _write(note)
    edit = f"<<<<<<< SEARCH\n{NOTE}\n=======\n{NOTE}, read\n>>>>>>> REPLACE"
    caller = write_caller(place / "model", "unused", {}, f"note.txt\n```\n{edit}\n```\n")
    env = _environment(place) | {"OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    prices = Path(env["HOME"]) / ".aider" / "caches" / "model_prices_and_context_window.json"
    prices.parent.mkdir(parents=True)
    prices.write_text('{"none": {}}')  # otherwise it is fetched
    with server(str(caller), CONTEXT, "--any-model-name") as running:
        model = ["--model", "openai/gpt-x", "--openai-api-base", f"{running.url}/v1", "--edit-format", "diff"]
        quiet = ["analytics", "auto-commits", "check-update", "detect-urls", "git", "show-model-warnings"]
        command = [str(python.parent / "aider"), *model, "--yes-always", *(f"--no-{name}" for name in quiet)]
        for more in ([], ["--restore-chat-history"]):
            note.write_text(f"{NOTE}\n")
            said = call([*command, *more, "--message", "Note that it was read.", "note.txt"], note.parent, env)
            if note.read_text() != f"{NOTE}, read\n":
                raise AssertionError(f"the file was not edited: {said}")
    return version


CODEX = """
model = "gpt-x"
model_provider = "tenuto"
[model_providers.tenuto]
name = "Tenuto"
base_url = "{url}/v1"
env_key = "TENUTO_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
[analytics]
enabled = false
"""


def _show(record: Recording) -> None:
    """Prints the earlier tokens that were reused. Raises `AssertionError` if they are too few."""
    for reused, earlier in record.reuse(REQUESTS):
        print(f"  {reused:,} of {earlier:,} earlier tokens reused")


def _write(note: Path) -> None:
    note.parent.mkdir()
    note.write_text(f"{NOTE}\n")


def _environment(place: Path) -> dict[str, str]:
    """Returns the environment of a new user with an empty home directory."""
    home = place / "home"
    home.mkdir()
    return {"PATH": os.environ["PATH"], "HOME": str(home)}


def _events(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def _text_of(events: list[dict[str, Any]], kind: str) -> str:
    return json.dumps([event for event in events if event["type"] == kind])


def _expect(holds: bool, problem: str, events: list[dict[str, Any]]) -> None:
    if not holds:
        raise AssertionError(f"{problem}: {json.dumps(events)[-3000:]}")
