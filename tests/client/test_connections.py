"""Failures that only a client can meet: absent servers, broken connections, turns that outlive them."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import tenuto
from tenuto.base.errors import (
    Disconnected,
    EngineStopped,
    InvalidRequest,
    NotFound,
    SessionBusy,
    TenutoError,
    Unauthorized,
    Unreachable,
    VersionMismatch,
)
from tenuto.client import feed
from tenuto.client.core import SessionCore
from tests.client.conftest import Proxy
from tests.eventually import eventually
from tests.said import said
from tests.serve.server import Server, serving


@pytest.fixture
def through(remote: tenuto.RemoteEngine, proxy: Proxy) -> Iterator[tenuto.RemoteEngine]:
    """A client behind the proxy."""
    with tenuto.connect(proxy.url) as engine:
        yield engine


def test_a_turn_on_a_broken_connection_is_rolled_back_and_raises(
    remote: tenuto.RemoteEngine, through: tenuto.RemoteEngine, proxy: Proxy
) -> None:
    session = through.session()
    turn = session.turn([1], ignore_eos=True)
    next(turn.tokens())
    proxy.cut()
    with pytest.raises(Disconnected, match="rolled back"):
        turn.result()
    with pytest.raises(Disconnected):
        turn.result()
    same = remote.attach(session.id)
    eventually(lambda: same.info.turn is None)
    assert same.history == []
    assert session.turn([1], max_new_tokens=3, ignore_eos=True).result().kept == 3


def test_a_turn_that_continues_misses_no_token_wherever_its_connection_breaks(
    remote: tenuto.RemoteEngine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "FIRST_PAUSE", 0.001)
    whole = remote.session().turn([1], max_new_tokens=8, ignore_eos=True)
    text, expected = "".join(whole), said([1], 8)
    for cut in range(0, 1600, 40):
        session = remote.session()
        with tenuto.connect(proxy.url) as engine:
            proxy.connections, proxy.cuts = 0, [cut, cut]
            turn = unasked(engine, session.id).turn([1], max_new_tokens=8, ignore_eos=True, on_disconnect="continue")
            assert list(turn.tokens()) == expected
            assert turn.result().kept == 8
            assert turn.text == text
        assert session.history == [1, *expected]
        assert session.info.version == 1
        assert proxy.connections == 3 or cut > 500


def unasked(engine: tenuto.RemoteEngine, session_id: str) -> tenuto.RemoteSession:
    """Returns a session through `engine` without checking that it exists."""
    return tenuto.RemoteSession(engine, SessionCore(engine._core, session_id))


def test_waiting_for_a_server_that_does_not_return_ends(
    through: tenuto.RemoteEngine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "PATIENCE_SECONDS", 0.2)
    turn = through.session().turn([1], ignore_eos=True, on_disconnect="continue")
    next(turn.tokens())
    proxy.refuse = True
    proxy.cut()
    with pytest.raises(Disconnected):
        turn.result()


def test_a_turn_with_on_disconnect_continue_outlives_its_stream(remote: tenuto.RemoteEngine) -> None:
    session = remote.session()
    with session.turn([1], max_new_tokens=200, ignore_eos=True, on_disconnect="continue") as turn:
        next(turn.tokens())
    assert turn.turn_id is not None
    followed = session.follow(turn.turn_id)
    assert followed.result().kept == 200
    assert followed.token_ids == said([1], 200)
    assert session.follow(turn.turn_id).result() == followed.result()
    with pytest.raises(NotFound):
        session.follow("turn-" + 24 * "0")


def test_a_turn_with_on_disconnect_continue_can_be_aborted(remote: tenuto.RemoteEngine) -> None:
    session = remote.session()
    turn = session.turn([1], ignore_eos=True, on_disconnect="continue")
    next(turn.tokens())
    assert not turn.abort().committed
    assert session.info.version == 0


def test_a_turn_may_wait_for_the_previous_one(remote: tenuto.RemoteEngine) -> None:
    session = remote.session()
    first = session.turn([1], ignore_eos=True)
    with pytest.raises(SessionBusy):
        session.append([2])
    results = list[tenuto.TurnResult]()
    waiting = threading.Thread(target=lambda: results.append(session.append([2], if_busy="queue")))
    waiting.start()
    list(itertools.islice(first.tokens(), 10))
    assert first.abort(keep=10).version == 1
    waiting.join()
    assert results[0].usage.prompt == 12


def test_a_server_names_the_refused_option_as_a_local_engine_does(remote: tenuto.RemoteEngine) -> None:
    with pytest.raises(InvalidRequest) as refused:
        remote.session().turn([10**6])
    assert refused.value.param == "input"


def test_an_unknown_session_is_not_found(remote: tenuto.RemoteEngine) -> None:
    for name in ("", ".", "..", "../..", "a/b", "?", "#", "%2e", "é"):
        with pytest.raises((NotFound, InvalidRequest)):
            remote.attach(name)


def test_an_absent_server_is_a_typed_error(proxy: Proxy) -> None:
    proxy.close()
    with tenuto.connect(proxy.url) as engine:
        for call in (engine.sessions, engine.session, lambda: engine.generate([1])):
            with pytest.raises(Unreachable, match="no connection"):
                call()

    async def ask() -> None:
        async with tenuto.connect_async(proxy.url) as engine:
            with pytest.raises(Unreachable):
                await engine.generate([1]).result()

    asyncio.run(ask())


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "", None, "http://x:port", 5])
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="address"):
        tenuto.connect(url)


@pytest.mark.parametrize(
    ("status", "content"),
    [
        (404, b"lost"),
        (500, b'{"error": "down"}'),
        (200, b"<html>"),
        (200, b"event: delta\ndata: {}\n\n"),
        (200, b"event: committed\ndata: 5\n\n"),
    ],
)
def test_another_kind_of_server_is_a_typed_error(status: int, content: bytes) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever).start()
        with tenuto.connect(f"http://127.0.0.1:{server.server_port}") as engine:
            with pytest.raises(TenutoError, match=r"answer|ended"):
                unasked(engine, "any").turn([1])
            with pytest.raises(TenutoError, match="answer"):
                engine.sessions()
        server.shutdown()


def test_a_key_is_sent() -> None:
    with serving("--model", "witness", env={"TENUTO_API_KEY": "secret"}) as server:
        with tenuto.connect(server.url, "secret") as engine:
            assert engine.sessions() == []
        for key in (None, "other"):
            with tenuto.connect(server.url, key) as engine, pytest.raises(Unauthorized):
                engine.sessions()


def test_open_turns_and_later_calls_fail_when_the_server_is_killed() -> None:
    with serving("--model", "witness") as server, tenuto.connect(server.url) as engine:
        turn = engine.session().turn([1], ignore_eos=True)
        next(turn.tokens())
        server.kill_all()
        with pytest.raises(Disconnected):
            turn.result()
        with pytest.raises(Unreachable):
            engine.session()


def test_a_turn_raises_when_its_engine_dies() -> None:
    with serving("--model", "witness") as server, tenuto.connect(server.url) as engine:
        turn = engine.session().turn([1], ignore_eos=True)
        next(turn.tokens())
        os.kill(server.engine_pid, signal.SIGKILL)
        with pytest.raises((EngineStopped, Disconnected)):
            turn.result()


def test_an_unreferenced_client_ends_its_thread(witness: Server) -> None:
    engine = tenuto.connect(witness.url)
    engine.sessions()
    thread = engine.transport.connection._thread
    del engine
    gc.collect()
    eventually(lambda: not thread.is_alive())


def test_a_client_loads_no_model_code(witness: Server) -> None:
    code = (
        f"import sys, tenuto; tenuto.connect({witness.url!r}).sessions(); "
        "sys.exit(bool({'torch', 'tenuto.engine', 'tenuto.runtime', 'tenuto.text', 'fastapi'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unnamed_sessions_close_with_their_client_and_named_ones_stay(remote: tenuto.RemoteEngine) -> None:
    with tenuto.connect(str(remote.transport.connection._http.base_url)) as engine:
        plain, named = engine.session(), engine.session("named", ttl=600)
        plain.append([1])
        named.append([1])
        made = [plain.fork(), named.fork(), named.trim([1]), named.fork(session_id="named-fork")]
        running = plain.turn([2], ignore_eos=True)
        next(running.tokens())
        engine.attach("named")
        assert len(remote.sessions()) == 6
        made[0].close()
        assert len(engine.transport.connection.leftovers) == 3
    assert [info.session_id for info in remote.sessions()] == ["named", "named-fork"]


def test_sessions_still_opening_when_their_client_closes_are_also_closed(
    remote: tenuto.RemoteEngine, proxy: Proxy
) -> None:
    parent = remote.session("parent")
    parent.append([1])
    with tenuto.connect(proxy.url) as engine, ThreadPoolExecutor() as pool:
        mine = engine.attach("parent")
        proxy.answers.clear()
        opening = [pool.submit(call) for call in (engine.session, mine.fork, lambda: mine.trim([1]))]
        eventually(lambda: len(remote.sessions()) == 4)
        engine.transport.connection.request_stop()
        proxy.answers.set()
        engine.close()
        assert len({each.result().id for each in opening}) == 3
    assert [info.session_id for info in remote.sessions()] == ["parent"]


def test_any_number_of_sessions_close_with_their_client(remote: tenuto.RemoteEngine) -> None:
    async def open_many() -> None:
        async with tenuto.connect_async(str(remote.transport.connection._http.base_url)) as engine:
            await asyncio.gather(*(engine.session() for _ in range(100)))
            await engine.session("kept")
            assert len(await engine.sessions()) == 101

    asyncio.run(open_many())
    assert [info.session_id for info in remote.sessions()] == ["kept"]


def test_sessions_of_an_unreferenced_client_are_closed(remote: tenuto.RemoteEngine, witness: Server) -> None:
    def opened() -> set[str]:
        return {info.session_id for info in remote.sessions()}

    session = tenuto.connect(witness.url).session()
    session_id = session.id
    gc.collect()
    assert session_id in opened()  # it holds its client
    del session
    gc.collect()
    eventually(lambda: session_id not in opened())


def test_sessions_of_a_client_that_dies_expire(remote: tenuto.RemoteEngine, witness: Server) -> None:
    code = f"import os, tenuto; kept = tenuto.connect({witness.url!r}).session(); os._exit(0)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    (left,) = remote.sessions()
    with witness.client() as http:
        assert http.get(f"/v1/sessions/{left.session_id}").json()["ttl"] == 86_400


def test_a_turn_may_require_the_version_of_its_session(remote: tenuto.RemoteEngine) -> None:
    session = remote.session()
    version = session.turn([1], max_new_tokens=2, ignore_eos=True, if_version=session.info.version).result().version
    kept = session.history
    for start in (session.turn, session.append):
        with pytest.raises(VersionMismatch):
            start([1], if_version=version - 1)
    with pytest.raises(VersionMismatch):
        session.regenerate(max_new_tokens=2, ignore_eos=True, if_version=version + 1)
    with pytest.raises(InvalidRequest, match="if_version"):
        session.turn([1], if_version=-1)
    assert (session.info.version, session.history) == (version, kept)
    assert session.regenerate(max_new_tokens=2, ignore_eos=True, if_version=version).result().version > version
