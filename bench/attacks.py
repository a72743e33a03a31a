"""Measures how one client's worst requests disturb all others: `python -m bench.attacks [MODEL] [ATTACK...]`.

A tenant reads `STREAMS` streams while another one attacks. The figures are the longest gap in a stream, without the
attack and during it, and the memory of both processes before the attack, at its peak, and `SETTLING_SECONDS` after its
end. Attacks on memory run without streams, whose own memory would be counted.
"""

from __future__ import annotations

import http.client
import json
import random
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from bench.server import Processes, bearer, resident, server

STREAMS = 16
SECONDS = 12.0
"""Duration of attacks that do not end by themselves."""
SETTLING_SECONDS = 5.0
CLIENTS = 4
BODY_BYTES = 31 * 10**6
CONTEXT = {"witness": 65_536}
OTHER_CONTEXT = 8192
KEYS = """[[keys]]
tenant = "reader"
key = "reader"
admin = true

[[keys]]
tenant = "attacker"
key = "attacker"
"""
READER, ATTACKER = "reader", "attacker"


# -- the readers


class Stream:
    """One stream, which is requested again when it ends."""

    def __init__(self, url: str, number: int, tokens: int) -> None:
        self._address, self._number, self._tokens = urlsplit(url), number, tokens
        self.last = 0.0  # when the last piece came; 0 before the first
        self.longest = 0.0
        self.connection = self._connect()

    def _connect(self) -> socket.socket:
        connection = socket.create_connection((self._address.hostname, self._address.port))
        params = {"max_new_tokens": self._tokens, "ignore_eos": True, "temperature": 0}
        body = json.dumps({"input_ids": [self._number + 5], "stream": True, "sampling_params": params}).encode()
        head = f"POST /generate HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {READER}\r\nconnection: close\r\n"
        connection.sendall(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode())
        connection.sendall(body)
        return connection

    def heard(self, now: float) -> bool:
        """Reads a piece. Returns False if the stream has ended and another has been requested."""
        received = self.connection.recv(2**18)
        if not received:
            self.connection.close()
            self.last, self.connection = 0.0, self._connect()
            return False
        if self.last:
            self.longest = max(self.longest, now - self.last)
        self.last = now
        return True


def watch(url: str, tokens: int) -> None:
    """Reads streams. For every line of input, prints the longest gap since the previous line, in seconds."""
    streams = [Stream(url, number, tokens) for number in range(STREAMS)]
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.connection, selectors.EVENT_READ, stream)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            ready, now = selector.select(), time.perf_counter()
            for key, _ in ready:
                stream = key.data
                if stream is None:
                    if not sys.stdin.readline():
                        return
                    print(max(max(each.longest, now - each.last if each.last else 0) for each in streams), flush=True)
                    for each in streams:
                        each.longest, each.last = 0.0, now if each.last else 0.0
                    continue
                was = stream.connection
                if not stream.heard(now):
                    selector.unregister(was)
                    selector.register(stream.connection, selectors.EVENT_READ, stream)


class Watcher:
    """Runs `watch` in a separate process."""

    def __init__(self, url: str, tokens: int) -> None:
        command = [sys.executable, "-m", "bench.attacks", "--watch", url, str(tokens)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own command

    def longest(self) -> float:
        """Returns the longest gap since the last call, in seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


# -- the attackers


class Attacker:
    """Sends requests and counts the kinds of answers."""

    def __init__(self, url: str, seconds: float) -> None:
        self.address = urlsplit(url)
        self.ends = time.perf_counter() + seconds
        self.answers: Counter[str] = Counter()

    @property
    def over(self) -> bool:
        return time.perf_counter() > self.ends

    def ask(self, path: str, body: object, *, tenant: str = ATTACKER, until_over: bool = False) -> float:
        """Sends a request and reads the answer, with `until_over` only until the attack is over. Returns the seconds
        taken."""
        began = time.perf_counter()
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **bearer(tenant)}
        patience = max(1.0, self.ends - began) if until_over else 120.0
        connection = http.client.HTTPConnection(self.address.hostname or "", self.address.port, timeout=patience)
        try:
            connection.request("POST", path, raw, headers)
            response = connection.getresponse()
            while response.read1(2**20) and not (until_over and self.over):
                pass
            self.answers[str(response.status)] += 1
        except (OSError, http.client.HTTPException) as error:
            self.answers[type(error).__name__] += 1
        finally:
            connection.close()
        return time.perf_counter() - began

    def together(self, work: Callable[[int], object], clients: int) -> None:
        """Runs `work` in several clients at the same time."""
        threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def repeat(self, path: str, body: object, clients: int = CLIENTS, *, until_over: bool = False) -> None:
        """Sends the same request again and again from several clients."""
        raw = json.dumps(body).encode() if not isinstance(body, bytes) else body

        def go(_: int) -> None:
            while not self.over:
                self.ask(path, raw, until_over=until_over)

        self.together(go, clients)


def filled(piece: str) -> str:
    """Returns `piece` repeated to the size of a large body."""
    return piece * (BODY_BYTES // len(piece))


CHAT = "/v1/chat/completions"
ASKED = '"messages":[{"role":"user","content":"x"}],"max_tokens":1'
DENSE: dict[str, tuple[str, Callable[[], str]]] = {
    "lists": (CHAT, lambda: '{"model":"default","messages":[' + filled("[],") + "[]]}"),
    "objects": (CHAT, lambda: '{"model":"default","user":[' + filled('{"a":1},') + "{}]," + ASKED + "}"),
    "keys": (
        CHAT,
        lambda: '{"model":"default",' + "".join(f'"k{n}":0,' for n in range(BODY_BYTES // 14)) + ASKED + "}",
    ),
    "schema": (
        CHAT,
        lambda: (
            '{"model":"default",' + ASKED + ',"response_format":{"type":"json_schema","json_schema":{"name":"x",'
            '"schema":{"enum":[' + filled("[],") + "[]]}}}}"
        ),
    ),
    "ids": ("/generate", lambda: '{"input_ids":[' + filled("1,") + "1]}"),
    "escapes": (CHAT, lambda: '{"model":"default","messages":[{"role":"user","content":"' + filled("\\u00e9") + '"}]}'),
    "text": (CHAT, lambda: '{"model":"default","messages":[{"role":"user","content":"' + filled("hello ") + '"}]}'),
    "emoji": (CHAT, lambda: '{"model":"default","messages":[{"role":"user","content":"' + filled("hello ") + '😀"}]}'),
    "messages": (
        CHAT,
        lambda: json.dumps(
            {"model": "default", "messages": [{"role": "user", "content": "x" * (BODY_BYTES // 10_000 - 40)}] * 10_000}
        ),
    ),
    "prompts": ("/generate", lambda: json.dumps({"text": ["x" * (BODY_BYTES // 1024 - 4)] * 1024})),
}


def dense(kind: str) -> Callable[[Attacker], None]:
    """Returns an attack with bodies of 31 MB that take long to parse."""
    path, body = DENSE[kind]
    return lambda attacker: attacker.repeat(path, body().encode(), until_over=True)


def stop_regex(attacker: Attacker) -> None:
    """Sends stop patterns that are slow to search."""
    patterns = [rf"(?s)[^\x01]{'.' * n}.{{980}}\x{{10ffff}}$" for n in range(8)]
    body = {"model": "default", "prompt": [5, 6, 7, 8, 9], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    attacker.repeat("/v1/completions", {**body, "stop_regex": patterns, "temperature": 0}, 8, until_over=True)


def allowed_regex(attacker: Attacker) -> None:
    """Sends the slowest stop pattern that is allowed."""
    body = {"model": "default", "prompt": [5, 6, 7, 8, 9], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    pattern = r"(?s).*a.{240}\x{10ffff}"
    attacker.repeat("/v1/completions", {**body, "stop_regex": pattern, "temperature": 0}, 8, until_over=True)


def grammars(attacker: Attacker) -> None:
    """Sends schemas that take seconds to compile; reports how long another tenant's small schema takes meanwhile."""

    def wait() -> float:
        schema = {"type": "object", "properties": {f"v{random.randrange(10**9)}": {"type": "boolean"}}}
        return attacker.ask(
            "/v1/completions",
            {"model": "default", "prompt": "x", "max_tokens": 2, "guided_json": schema},
            tenant=READER,
        )

    def slow(number: int) -> None:
        names = [(f"p{number}_{k}", f"^[a-z]{{1,50}}x{k}$") for k in range(3000)]
        schema = {"type": "object", "properties": {name: {"type": "string", "pattern": at} for name, at in names}}
        attacker.ask("/v1/completions", {"model": "default", "prompt": "x", "max_tokens": 1, "guided_json": schema})

    alone = min(wait() for _ in range(3))
    attacking = threading.Thread(target=attacker.together, args=(slow, 12))
    attacking.start()
    time.sleep(1)
    beside = wait()
    attacking.join()
    attacker.answers[f"another's schema: {alone:.2f} s alone, {beside:.2f} s beside"] += 1


def logprobs(attacker: Attacker) -> None:
    """Requests streams in which every event repeats all log-probabilities so far."""
    params = {"max_new_tokens": 6000, "ignore_eos": True, "temperature": 0}
    asked = {"return_logprob": True, "top_logprobs_num": 20, "return_text_in_logprobs": True}
    body = {"input_ids": [5, 6, 7], "stream": True, "sampling_params": params, **asked}
    attacker.repeat("/generate", body, 8, until_over=True)


def metadata(attacker: Attacker) -> None:
    """Requests stored responses with as much metadata as a body can hold."""
    for number in range(20):
        asked = {"model": "default", "input": "x", "max_output_tokens": 1}
        attacker.ask("/v1/responses", {**asked, "metadata": {"a": f"{number:06}{filled('x')}"}})


def grammar_memory(attacker: Attacker) -> None:
    """Sends short expressions with large automata."""
    for number in range(12):
        pattern = f"[a-z ]*(a|b)[a-z ]{{{200 + number}}}"
        body = {"model": "default", "prompt": "the ", "max_tokens": 150, "temperature": 1.5, "ignore_eos": True}
        attacker.ask("/v1/completions", {**body, "guided_regex": pattern})


def chunked(attacker: Attacker) -> None:
    """Sends chunked bodies that never end."""
    head = f"POST /v1/sessions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ATTACKER}\r\n"
    head += "content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    connections = []
    for _ in range(300):
        connection = socket.create_connection((attacker.address.hostname, attacker.address.port))
        connection.sendall(head.encode())
        connections.append(connection)
    while not attacker.over:
        for connection in connections:
            try:
                connection.sendall(b"8000\r\n" + b" " * 0x8000 + b"\r\n")
            except OSError:
                attacker.answers["broken"] += 1
    for connection in connections:
        connection.close()


def texts(attacker: Attacker) -> None:
    """Sends long texts to tokenize: one, then several at once."""
    body = json.dumps({"prompt": filled("hello ")}).encode()
    attacker.ask("/tokenize", body)
    attacker.together(lambda _: attacker.ask("/tokenize", body), CLIENTS)


def ended_turns(attacker: Attacker) -> None:
    """Runs many short turns, each with a long grammar."""
    source = '{"type":"object"}' + " " * 262_000
    body = json.dumps({"model": "default", "prompt": "x", "max_tokens": 1, "guided_json": source}).encode()
    for _ in range(800):
        attacker.ask("/v1/completions", body)


STALLS: dict[str, Callable[[Attacker], None]] = {
    **{f"dense {kind}": dense(kind) for kind in DENSE},
    "stop_regex": stop_regex,
    "allowed regex": allowed_regex,
    "grammars": grammars,
    "logprobs": logprobs,
}
HOGS: dict[str, Callable[[Attacker], None]] = {
    "metadata": metadata,
    "grammar memory": grammar_memory,
    "chunked bodies": chunked,
    "long texts": texts,
    "ended turns": ended_turns,
}
ATTACKS = STALLS | HOGS


def attack(name: str, url: str) -> None:
    """Runs an attack and prints the kinds and numbers of answers."""
    attacker = Attacker(url, SECONDS)
    ATTACKS[name](attacker)
    print(", ".join(f"{answer}: {count}" if count > 1 else answer for answer, count in attacker.answers.items()))


# -- the measurement


@contextmanager
def height(running: Processes) -> Iterator[list[float]]:
    """Measures the peak memory of both processes together during the block, in MB; it is item 0 of the given list."""
    most, over = [0.0], threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            most[0] = max(most[0], resident(running.edge) + resident(running.engine))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield most
    finally:
        over.set()
        looking.join()


def warm(url: str) -> None:
    """Lets the server take what it keeps for its own use: pages of the model's memory, and what all grammars share."""
    attacker = Attacker(url, SECONDS)
    for number in range(16):
        body = {"model": "default", "prompt": [5 + number, 6], "max_tokens": 150, "ignore_eos": True}
        attacker.ask("/v1/completions", {**body, "guided_regex": "[a-z ]{200}"} if number == 0 else body)
    attacker.ask("/flush_cache", {}, tenant=READER)


def measure(running: Processes, watcher: Watcher | None, name: str) -> None:
    """Measures one attack and prints its row."""
    without = beside = float("nan")
    if watcher is not None:
        watcher.longest()
        time.sleep(3)
        without = watcher.longest()
    else:
        warm(running.url)
        time.sleep(SETTLING_SECONDS)
    before = (resident(running.edge), resident(running.engine))
    command = [sys.executable, "-m", "bench.attacks", "--attack", name, running.url]
    with height(running) as most:
        answers = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()  # noqa: S603 - our own command
        if watcher is not None:
            beside = watcher.longest()
    time.sleep(SETTLING_SECONDS)
    after = (resident(running.edge), resident(running.engine))
    memory = f"{sum(before):>9.0f}{most[0] - sum(before):>+10.0f}"
    left = f"{after[0] - before[0]:>+8.0f}{after[1] - before[1]:>+8.0f}"
    print(f"{name:<16}{without:>9.3f}{beside:>9.3f}{memory}{left}  {answers}", flush=True)


def main(model: str = "witness:0.005", *names: str) -> None:
    """Prints the table."""
    context = CONTEXT.get(model.partition(":")[0], OTHER_CONTEXT)
    print(f"{model}: the longest gap of {STREAMS} streams in seconds, and memory in MB", flush=True)
    print(f"{'attack':<16}{'without':>9}{'beside':>9}{'MB':>9}{'highest':>10}{'edge':>8}{'engine':>8}  answers")
    with TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        keys.write_text(KEYS)
        for name in names or ATTACKS:
            with server(model, context, "--keys", str(keys), key=READER) as running:
                watcher = Watcher(running.url, context - 64) if name in STALLS else None
                try:
                    time.sleep(2)
                    measure(running, watcher, name)
                finally:
                    if watcher is not None:
                        watcher.close()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--watch", url, tokens]:
            watch(url, int(tokens))
        case ["--attack", name, url]:
            attack(name, url)
        case arguments:
            main(*arguments)
