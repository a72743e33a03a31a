"""`python -m tests.serve.killing --times 1000`: kills a server under load and starts it again, and checks that it comes
back with everything it acknowledged. An operation under way at the kill is there whole, or not at all.

A server is killed at any moment, right after an answer, while the journal or sessions' state is being written, while it
saves the rest of that after SIGTERM, or once that is done. A third of the servers have slow writes, so that premature
answers are lost, and a third a disk tier that is too small. Memory is small, so that sessions also go to disk before
that. Requests that were answered are repeated to the next server, which must give the same answers.

Acknowledged output is compared token for token. With `--model smollm2` all outputs, even those no client has seen, are
compared with the model's logits for the same tokens, computed at once in a separate session: every token must be the
likeliest. Where logits depend on the number of tokens in a step (kernels for AMX, PyTorch), a token's logit may be
below the highest by at most `tests.exec.kernels.allowed_behind`, for at most `MOST_BEHIND` of the tokens. That could
hide a wrong token in a long history; `--kernels avx512` allows no difference.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import httpx

from tenuto.exec.witness_hashes import advance, history_hash, next_token
from tests.exec.kernels import allowed_behind
from tests.serve.server import Server, serving
from tests.serve.test_killed_streams import VOCABULARY

Turns = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Input and output of each turn of a session."""
Behind = Callable[[Server, list[int], list[int]], list[float]]
"""Returns the gaps between the logits of some positions' tokens and the highest: 0 for the token the model would
generate, infinity for one that it certainly would not."""

WITNESS = "witness:0.002"
WORKERS = 6
MAX_TURNS = 12
"""Sessions with more turns are closed."""
SLOW_DISK = str(Path(__file__).parent / "slow_disk")
MOMENTS = ("any moment", "after an answer", "in a write", "in a save", "in a snapshot", "after a snapshot")
"""The moments at which a server is killed."""
IDLE_SECONDS = 0.5
PAGE = 32
LONG = 128
"""The number of tokens from which the state of a model's session is counted: fewer take less time to compute than to
read, so their state is not saved."""
SMALL = ("--context-length", "2048", "--memory", "80000", "--chunked-prefill-size", "16", "--max-running-requests", "8")
"""Options of the witness: room for about a third of the sessions, whose tokens take longer to compute than to read."""
DISKS = ("", " on a slow disk", " on a full disk")
FULL = ("--disk-tier-size", "20000")
"""Options with which the disk tier has no room for most sessions of the witness."""
MOST_BEHIND = 0.02
"""The share of generated tokens that may be less likely than others when computed again. With AMX 123 of 24,000 were,
one by 0.29, all others by less than 0.1."""


class Attempt(NamedTuple):
    """The expected effect of an operation on a session: it has `turns`, or is closed (`None`); with `given`, another
    turn follows, with this input and `wanted` tokens of output."""

    turns: Turns | None
    given: tuple[int, ...] | None = None
    wanted: int = 0


class Said(NamedTuple):
    """A request for a turn, with its idempotency key, and the tokens of its answer."""

    path: str
    body: dict[str, object]
    key: str
    tokens: list[int]


@dataclass
class Known:
    """The clients' knowledge: the turns of every acknowledged session, and the operations under way, by session.
    `found`: how many operations under way at a kill were there whole, and how many not at all; and of sessions that had
    been idle for `IDLE_SECONDS` at the kill, how many were asked, and how many had all their state but for a page.
    `changed`: the times of the last answers since the start of sessions that had a turn last. `compared`: the number of
    output tokens computed again, and `behind`: the gaps to the highest logit of those that were not the likeliest."""

    sessions: dict[str, Turns] = field(default_factory=dict)
    under_way: dict[str, Attempt] = field(default_factory=dict)
    said: dict[str, Said] = field(default_factory=dict)  # the last acknowledged turn of each session
    changed: dict[str, float] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)  # sessions that were idle at the last kill
    disk: str = ""  # the worse of the disks of the server that was killed last and of the one after it
    operations: int = 0
    found: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    behind: list[float] = field(default_factory=list)

    def acknowledged(self, session: str, output: tuple[int, ...]) -> None:
        """Notes that the operation on this session is done; `output` is that of its turn, if it was one."""
        turns, given, wanted = self.under_way.pop(session)
        self.said.pop(session, None)
        self.changed.pop(session, None)
        if given is not None:  # where a rewind or a fork ends, a hybrid need not have any state
            self.changed[session] = time.monotonic()
        self.operations += 1
        if turns is None:
            del self.sessions[session]
        else:
            assert len(output) == wanted
            self.sessions[session] = turns if given is None else (*turns, (given, output))


class Refused(Exception):
    """The server is ending and has not carried out an operation, or not all of it."""


def tokens_of(turns: Turns) -> list[int]:
    return [token for turn in turns for part in turn for token in part]


def witness_behind(_: Server, tokens: list[int], positions: list[int]) -> list[float]:
    state, likeliest = history_hash([]), []
    for token in tokens:
        likeliest.append(next_token(state, VOCABULARY))
        state = advance(state, token)
    return [0.0 if tokens[at] == likeliest[at] else math.inf for at in positions]


def model_behind(server: Server, tokens: list[int], positions: list[int]) -> list[float]:
    """Computes everything at once from nothing: turns that request log-probabilities of their input share no memory."""
    with server.client() as http:
        name = http.post("/v1/sessions", json={}).raise_for_status().json()["id"]
        body = {"input": tokens, "input_logprobs": 1}
        answer = http.post(f"/v1/sessions/{name}/append", json=body).raise_for_status().json()
        http.delete(f"/v1/sessions/{name}").raise_for_status()
    entries = answer["input_logprobs"]
    return [entries[at]["top"][0]["logprob"] - entries[at]["logprob"] for at in positions]


class Worker:
    """Opens, extends, forks, rewinds and closes its own sessions, one operation after another."""

    def __init__(
        self, http: httpx.AsyncClient, known: Known, rng: Random, name: str, answered: Callable[[], None]
    ) -> None:
        self._http = http
        self._known = known
        self._rng = rng
        self._name = name
        self._answered = answered

    async def run(self) -> None:
        while True:
            own = sorted(name for name in self._known.sessions if name.startswith(self._name))
            if not own or (len(own) < 4 and self._rng.random() < 0.1):
                await self._open()
                continue
            session = self._rng.choice(own)
            turns, dice = self._known.sessions[session], self._rng.random()
            if len(turns) >= MAX_TURNS or dice < 0.03:
                await self._do(session, Attempt(None), "DELETE", f"/v1/sessions/{session}")
            elif dice < 0.1 and turns:
                kept = self._rng.randrange(len(turns))
                await self._do(session, Attempt(turns[:kept]), "POST", f"/v1/sessions/{session}/rewind", {"turn": kept})
            elif dice < 0.17 and len(own) < 6:
                kept, child = self._rng.randint(0, len(turns)), self._new_name()
                body = {"turn": kept, "id": child}
                await self._do(child, Attempt(turns[:kept]), "POST", f"/v1/sessions/{session}/fork", body)
            else:
                await self._turn(session, turns)

    def _new_name(self) -> str:
        return f"{self._name}{self._rng.getrandbits(40):x}"

    async def _open(self) -> None:
        name = self._new_name()
        await self._do(name, Attempt(()), "POST", "/v1/sessions", {"id": name})

    async def _turn(self, session: str, turns: Turns) -> None:
        given = tuple(self._rng.randrange(VOCABULARY) for _ in range(self._rng.randint(1, 30)))
        wanted = self._rng.choice((0, 1, 8, 40))
        attempt, path = Attempt(turns, given, wanted), f"/v1/sessions/{session}"
        if wanted:
            body = {"input": list(given), "max_new_tokens": wanted, "ignore_eos": True, "stream": False}
            await self._do(session, attempt, "POST", f"{path}/turns", body)
        else:
            await self._do(session, attempt, "POST", f"{path}/append", {"input": list(given)})

    async def _do(
        self, session: str, attempt: Attempt, method: str, path: str, body: dict[str, object] | None = None
    ) -> None:
        self._known.under_way[session] = attempt
        key = f"{self._rng.getrandbits(60):x}"
        headers = {"idempotency-key": key} if attempt.given is not None else None
        answer = await self._http.request(method, path, json=body, headers=headers)
        if answer.status_code == 503:
            raise Refused
        assert answer.is_success, (method, path, answer.text)
        output: list[int] = []
        if attempt.given is not None and body is not None:
            if not answer.json()["committed"]:
                raise Refused
            output = answer.json()["tokens"]
        self._known.acknowledged(session, tuple(output))
        if attempt.given is not None and body is not None:
            self._known.said[session] = Said(path, body, key, output)
        self._answered()


class Killer:
    """Kills a server and its engine at a moment of the chosen kind, within about `seconds`."""

    def __init__(self, server: Server, journal: Path, tier: Path, rng: Random, seconds: float) -> None:
        self._server = server
        self._tier = tier
        self._files = rng.randint(1, 12)
        self._log = Path(f"{journal}-wal")
        self.moment = rng.choice(MOMENTS)
        self._after = 0.02 + rng.random() * seconds
        self._answers = rng.randint(1, 30)

    def answered(self) -> None:
        """Notes that a client has just got an answer."""
        self._answers -= 1
        if self._answers == 0 and self.moment == "after an answer":
            self._server.kill_all()

    def wait(self) -> None:
        """Waits for the moment, except for an answer's, and kills the server."""
        if self.moment == "after an answer":
            return
        time.sleep(self._after)
        if self.moment == "in a write":
            self._wait_for_change(self._state)
        elif self.moment in ("in a save", "in a snapshot"):
            if self.moment == "in a snapshot":
                self._server.process.send_signal(signal.SIGTERM)
            for _ in range(self._files):
                self._wait_for_change(self._snapshot)
        elif self.moment == "after a snapshot":
            assert self._server.stop() == 0, self._server.lines
        self._server.kill_all()

    def _wait_for_change(self, state: Callable[[], object]) -> None:
        before, deadline = state(), time.monotonic() + 60
        while state() == before and self._server.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.00005)

    def _snapshot(self) -> frozenset[tuple[str, int]]:
        """Returns a value that changes whenever a file of the disk tier is created or grows."""
        with suppress(FileNotFoundError), os.scandir(self._tier) as entries:
            return frozenset((entry.name, entry.stat().st_size) for entry in entries)
        return frozenset()

    def _state(self) -> tuple[int, int] | None:
        """Returns a value that changes whenever the journal is written."""
        try:
            found = self._log.stat()
        except FileNotFoundError:
            return None
        return found.st_size, found.st_mtime_ns


async def load_until_killed(server: Server, known: Known, rng: Random, killer: Killer) -> None:
    """Runs workers until the server is killed."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        workers = [
            Worker(http, known, Random(rng.random()), f"w{number}-", killer.answered) for number in range(WORKERS)
        ]
        tasks = [asyncio.create_task(worker.run()) for worker in workers]
        await asyncio.to_thread(killer.wait)
        now = time.monotonic()
        known.idle = [name for name, when in known.changed.items() if when < now - IDLE_SECONDS]
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, httpx.TransportError | Refused), f"a worker ended with {outcome!r}"


def check(server: Server, known: Known, behind: Behind) -> None:
    """Checks that every session is as acknowledged, or as an operation under way would have left it."""
    with server.client() as http:
        found: dict[str, Turns] = {}
        for name in [each["id"] for each in listed(http)]:
            records = http.get(f"/v1/sessions/{name}/turns", params={"limit": 1000}).json()["data"]
            found[name] = tuple((tuple(each["input_tokens"]), tuple(each["output_tokens"])) for each in records)
        for name in sorted(found.keys() | known.sessions.keys() | known.under_way.keys()):
            before, attempt = known.sessions.get(name), known.under_way.get(name)
            if attempt is not None and found.get(name) != before:
                assert done(attempt, found.get(name)), (
                    f"session {name} is {found.get(name)}; it was {before}, {attempt}"
                )
                check_outputs(server, known, behind, found.get(name, ())[len(attempt.turns or ()) :], attempt.turns)
                known.found["there whole"] += 1
                continue
            assert found.get(name) == before, f"session {name} is {found.get(name)}; it was {before}"
            known.found["not there"] += attempt is not None
        check_repeated(http, {name: said for name, said in known.said.items() if name not in known.under_way})
        least = 1 if behind is witness_behind else LONG
        idle = [name for name in known.idle if name not in known.under_way]
        check_state(http, known, [name for name in idle if len(tokens_of(found.get(name, ()))) >= least])
        for labels, count in re.findall(
            r'^tenuto_snapshots_total\{outcome="(.*)"\} (\S+)', http.get("/metrics").text, re.MULTILINE
        ):
            known.found[f"memory {labels}"] += int(float(count))
    known.said = {name: said for name, said in known.said.items() if name in found and name not in known.under_way}
    known.sessions, known.under_way, known.changed = found, {}, {}


def check_state(http: httpx.Client, known: Known, idle: list[str]) -> None:
    """Counts idle sessions whose state is there, by forks that go on with one token."""
    for name in idle[:5]:
        child = http.post(f"/v1/sessions/{name}/fork", json={}).raise_for_status().json()
        answer = http.post(f"/v1/sessions/{child['id']}/append", json={"input": [1]}).raise_for_status().json()
        http.delete(f"/v1/sessions/{child['id']}").raise_for_status()
        known.found[f"idle{known.disk}"] += 1
        known.found[f"with state{known.disk}"] += answer["usage"]["cached_tokens"] >= child["tokens"] - PAGE


def check_repeated(http: httpx.Client, said: dict[str, Said]) -> None:
    """Checks that a repeated request gets the same answer and runs nothing."""
    for name, (path, body, key, tokens) in list(said.items())[:3]:
        before = http.get(f"/v1/sessions/{name}").json()["version"]
        answer = http.post(path, json=body, headers={"idempotency-key": key}).raise_for_status().json()
        assert answer["tokens"] == tokens, f"a repeated turn of session {name} returns {answer}; it was {tokens}"
        assert http.get(f"/v1/sessions/{name}").json()["version"] == before


def done(attempt: Attempt, found: Turns | None) -> bool:
    """Returns whether the session is as the operation leaves it, whatever the output of its turn."""
    turns, given, wanted = attempt
    if found is None or turns is None or given is None:
        return found == turns
    return found[:-1] == turns and found[-1][0] == given and len(found[-1][1]) == wanted


def check_outputs(server: Server, known: Known, behind: Behind, turns: Turns, before: Turns | None = ()) -> None:
    """Checks that every turn's output is the model's after all that precedes it."""
    tokens, positions = tokens_of(before or ()), list[int]()
    for given, output in turns:
        tokens += given
        positions += range(len(tokens), len(tokens) + len(output))
        tokens += output
    if not positions:
        return
    found = behind(server, tokens, positions)
    known.compared += len(found)
    known.behind += [each for each in found if each > 0]
    with server.client() as http:
        allowed = allowed_behind(http.get("/v1/engine").json()["compute"])
    assert max(found) <= allowed, f"{turns} after {before} differs from the model's output: {found}"


def listed(http: httpx.Client) -> list[dict[str, str]]:
    sessions: list[dict[str, str]] = []
    after: str | None = ""
    while after is not None:
        page = http.get("/v1/sessions", params={"limit": 1000, "after": after}).json()
        sessions += page["data"]
        after = page["next"]
    return sessions


def kill_often(
    journal: Path,
    times: int,
    seed: int,
    model: str = WITNESS,
    say: Callable[[str], None] = lambda _: None,
    kernels: str = "auto",
) -> Known:
    """Kills a server this many times; returns the clients' final knowledge."""
    rng, known, began, moments = Random(seed), Known(), time.monotonic(), Counter[str]()
    tier = journal.with_name("tier")
    behind, seconds = (witness_behind, 2.0) if model.startswith("witness") else (model_behind, 4.0)
    for number in range(times + 1):
        disk = rng.choice(DISKS)
        path = os.pathsep.join([*([SLOW_DISK] if disk == DISKS[1] else []), *sys.path])
        kept = ("--journal", str(journal), "--disk-tier", str(tier), "--drain-seconds", "0.1")
        small = SMALL if model.startswith("witness") else ()
        full = FULL if disk == DISKS[2] else ()
        arguments = ("--model", model, "--kernels", kernels, *kept, *small, *full, "--log-level", "warning")
        with serving(*arguments, env={"PYTHONPATH": path}) as server:
            known.disk = disk if disk == DISKS[2] else known.disk  # it discards most of what the last one has left
            check(server, known, behind)
            if number < times:
                killer = Killer(server, journal, tier, rng, seconds)
                asyncio.run(load_until_killed(server, known, rng, killer))
                known.disk = disk
                moments[killer.moment + known.disk] += 1
            else:
                for turns in known.sessions.values():
                    check_outputs(server, known, behind, turns)
        if number == times or moments.total() % 20 == 0:
            say(
                f"{moments.total()} kills in {time.monotonic() - began:.0f} s: {dict(moments)}; "
                f"{known.operations} operations acknowledged; operations under way at a kill: {dict(known.found)}; "
                f"{known.compared} tokens computed again, {len(known.behind)} of them others, their logits at most "
                f"{max(known.behind, default=0.0):.3f} below the highest"
            )
    assert len(known.behind) <= MOST_BEHIND * max(500, known.compared), sorted(known.behind)
    return known


def main() -> None:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.serve.killing", description=__doc__)
    parser.add_argument("--model", default=WITNESS)
    parser.add_argument("--kernels", default="auto", help="of a model, as of tenuto serve")
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, suppress(KeyboardInterrupt):
        journal = Path(directory) / "journal"
        say = partial(print, flush=True)
        kill_often(journal, arguments.times, arguments.seed, arguments.model, say, kernels=arguments.kernels)
        print("nothing acknowledged was lost")


if __name__ == "__main__":
    main()
