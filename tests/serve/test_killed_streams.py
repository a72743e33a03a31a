"""Clients that vanish at any moment leave every session at its last commit."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from random import Random

import httpx

from tenuto.exec.witness_hashes import advance, history_hash, next_token
from tests.serve.server import Server

SESSIONS = 24
STREAMS = 300
VOCABULARY = 1000


def witness_output(history: list[int], tokens: int) -> list[int]:
    """Returns the witness's output after a history."""
    state, output = history_hash(history), []
    for _ in range(tokens):
        output.append(next_token(state, VOCABULARY))
        state = advance(state, output[-1])
    return output


async def kill_one(http: httpx.AsyncClient, session: str, rng: Random) -> str:
    """Starts a turn in one of several ways and disconnects at some moment, or not; returns the outcome."""
    body = {
        "input": [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 40))],
        "max_new_tokens": rng.choice((1, 20, 400, 2000)),
        "if_busy": rng.choice(("reject", "queue")),
        "stream": rng.random() < 0.8,
    }
    aborts, outcome = rng.random() < 0.2, "killed before its answer"
    with suppress(TimeoutError):
        async with asyncio.timeout(rng.random() * 0.6):
            async with http.stream("POST", f"/v1/sessions/{session}/turns", json=body) as response:
                outcome = "killed in its midst"
                async for _ in response.aiter_lines():
                    if aborts:
                        aborts = False
                        keep = rng.choice(("none", "all", "delivered", 3))
                        await http.post(f"/v1/sessions/{session}/abort", json={"keep": keep})
                        outcome = "aborted"
            assert response.status_code in (200, 409), await response.aread()
            if response.status_code == 409:
                outcome = "rejected"
            else:
                outcome = "ended" if outcome == "killed in its midst" else "aborted"
    return outcome


async def settle(http: httpx.AsyncClient, session: str) -> None:
    """Waits until the session has no open turn."""
    for _ in range(1500):
        if (await http.get(f"/v1/sessions/{session}")).json()["turn"] is None:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"a turn of {session} is still open")


async def check(http: httpx.AsyncClient, session: str) -> None:
    """Checks that the next turn follows from the committed history and recomputes none of it."""
    records = (await http.get(f"/v1/sessions/{session}/turns", params={"limit": 1000})).json()["data"]
    history = [token for record in records for token in record["input_tokens"] + record["output_tokens"]]
    shown = (await http.get(f"/v1/sessions/{session}")).json()
    assert shown["tokens"] == len(history)
    replayed: list[int] = []
    for record in records:  # each output is the witness's after exactly this history
        replayed += record["input_tokens"]
        assert record["output_tokens"] == witness_output(replayed, len(record["output_tokens"]))
        replayed += record["output_tokens"]
    answer = await http.post(
        f"/v1/sessions/{session}/turns", json={"input": [1, 2, 3], "max_new_tokens": 5, "stream": False}
    )
    assert answer.status_code == 200, answer.text
    turn = answer.json()
    assert turn["tokens"] == witness_output([*history, 1, 2, 3], 5)
    assert turn["usage"]["cached_tokens"] == max(0, len(history) - 1)


async def kill_streams(url: str) -> None:
    rng = Random(7)
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
        names = [f"killed-{n}" for n in range(SESSIONS)]
        for name in names:
            await http.post("/v1/sessions", json={"id": name})
            await http.post(f"/v1/sessions/{name}/append", json={"input": [rng.randrange(VOCABULARY)] * 30})
        pending = [kill_one(http, rng.choice(names), Random(n)) for n in range(STREAMS)]
        outcomes = Counter[str]()
        for start in range(0, STREAMS, 30):
            outcomes.update(await asyncio.gather(*pending[start : start + 30]))
        print(dict(outcomes))
        assert set(outcomes) == {"killed before its answer", "killed in its midst", "rejected", "aborted", "ended"}
        for name in names:
            await settle(http, name)
            await check(http, name)


def test_three_hundred_killed_streams_leave_every_session_right(witness: Server) -> None:
    asyncio.run(kill_streams(witness.url))
