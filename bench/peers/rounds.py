"""Rounds of measurement: in each, every peer runs the workload of every shape."""

from __future__ import annotations

import json
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop

from bench.peers.catalog import Peer, Server, Setting
from bench.peers.processes import Disturbance, Group, PeerFailed, free_port, started, wait_until_ready
from bench.peers.workload import WARM_UP_TURNS, Figures, Outcome, Shape, WordsWorkload, figures, workload
from tenuto.base.errors import TenutoError
from tenuto.cli.bench import Timed, measure, timing
from tenuto.cli.bench_apis import Counts

WARM_UP_SEED = 1_000_000
"""Offset added to the seed of a run, so that its warm-up has other inputs."""

Say = Callable[[str], None]


class Running(ABC):
    """A started peer. `first_token`: seconds from its start to its first token."""

    first_token = 0.0

    def __init__(self, group: Group) -> None:
        self.group = group

    @abstractmethod
    def run(self, work: WordsWorkload) -> Outcome:
        """Runs a workload. Raises `PeerFailed`."""


class RunningServer(Running):
    """A peer measured over HTTP, like in `tenuto bench`."""

    def __init__(self, group: Group, server: Server, url: str) -> None:
        super().__init__(group)
        self._server, self._url = server, httpx.URL(url)

    def run(self, work: WordsWorkload) -> Outcome:
        kind, history = self._server.conversation, self._server.history
        try:
            return Outcome(*uvloop.run(measure(self._url, None, kind, history, work, lambda: None)))
        except (TenutoError, RuntimeError) as error:
            raise self.group.failure(str(error)) from error


class RunningProgram(Running):
    """A peer measured inside its own process. Only the workload and the times pass through pipes."""

    def run(self, work: WordsWorkload) -> Outcome:
        inputs = [work.inputs(session) for session in range(work.sessions)]
        said = self.ask(json.dumps({"inputs": inputs, "output": work.output}))
        try:
            answer = json.loads(said)
            return Outcome([_timed(turn, work.input) for turn in answer["turns"]], answer["seconds"])
        except (ValueError, LookupError, RuntimeError) as error:
            raise self.group.failure(str(error)) from error

    def ask(self, line: str) -> str:
        """Sends `line` and returns the answer; if it is empty, sends nothing and returns the first line, which means
        that the peer is ready. Raises `PeerFailed`."""
        pipe_in, pipe_out = self.group.process.stdin, self.group.process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        if line:
            print(line, file=pipe_in, flush=True)
        said = pipe_out.readline()
        if not said:
            raise self.group.failure("it ended")
        return said


def _timed(turn: dict[str, Any], new: int) -> Timed:
    first, gaps = timing(turn["began"], dict(turn["arrivals"]))
    counts = Counts(turn["prompt"], turn["cached"], turn["generated"])
    return Timed(turn["number"], new, first, gaps, counts, began=turn["began"])


@contextmanager
def running(peer: Peer, setting: Setting, shape: Shape, vocabulary: tuple[int, ...], log: Path) -> Iterator[Running]:
    """Runs a peer during the block, which starts after its first token. Raises `PeerFailed`."""
    command, environment = peer.command(setting, shape), peer.environment(setting)
    place = free_port()
    ports = [] if peer.server is None else ["--port", str(place)]
    with started([*command, *ports], environment, log, piped=peer.server is None) as group:
        one: Running
        if peer.server is None:
            one = RunningProgram(group)
            one.ask("")
        else:
            url = f"http://127.0.0.1:{place}"
            wait_until_ready(group, url + peer.server.ready)
            one = RunningServer(group, peer.server, url)
        one.run(workload(Shape(1, 1), WARM_UP_SEED, vocabulary, output=1))
        one.first_token = time.perf_counter() - group.began
        yield one


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one peer. `resident`: bytes of memory in use at its end. `first_token`: see `Running`. `others`: the
    fraction of the processors' time that other processes used meanwhile. If the run failed, `error` is the reason, and
    `figures` is None."""

    peer: str
    shape: Shape
    figures: Figures | None
    resident: int
    first_token: float
    others: float
    error: str = ""


def order(peers: Sequence[Peer], turn: int) -> list[Peer]:
    """Returns the peers rotated by `turn`, so that each is first in turn."""
    first = turn % max(1, len(peers))
    return [*peers[first:], *peers[:first]]


class Rounds:
    """Measures peers. Peers that are started only once are suspended while others are measured."""

    def __init__(self, setting: Setting, vocabulary: tuple[int, ...], say: Say) -> None:
        self._setting = setting
        self._vocabulary = vocabulary
        self._say = say
        self._kept: dict[str, Running] = {}
        self._stack = ExitStack()

    def run(self, peers: Sequence[Peer], shapes: Sequence[Shape], rounds: int) -> list[Sample]:
        """Returns all samples, in the order of measurement."""
        samples: list[Sample] = []
        with self._stack, tempfile.TemporaryDirectory() as logs:
            for number in range(rounds):
                measured = [peer for peer in peers if number == 0 or not peer.single]
                for turn, shape in enumerate(shapes, number * len(shapes)):
                    for peer in order(measured, turn):
                        sample = self._sample(peer, shape, turn, Path(logs) / peer.name)
                        samples.append(sample)
                        self._say(f"round {number + 1}  {shape!s:>5}  {peer.title:<28}{_shown(sample)}")
        return samples

    def _sample(self, peer: Peer, shape: Shape, seed: int, log: Path) -> Sample:
        try:
            with self._running(peer, shape, log) as one:
                warm_up = Shape(shape.sessions, min(WARM_UP_TURNS, shape.turns))
                one.run(workload(warm_up, seed + WARM_UP_SEED, self._vocabulary))
                disturbance = Disturbance(one.group)
                told = figures(one.run(workload(shape, seed, self._vocabulary)))
                others, resident = disturbance.share(), one.group.resident_bytes()
                return Sample(peer.name, shape, told, resident, one.first_token, others)
        except PeerFailed as error:
            return Sample(peer.name, shape, None, 0, 0.0, 0.0, str(error))

    @contextmanager
    def _running(self, peer: Peer, shape: Shape, log: Path) -> Iterator[Running]:
        if not peer.once:
            with running(peer, self._setting, shape, self._vocabulary, log) as one:
                yield one
            return
        if peer.name not in self._kept:
            start = running(peer, self._setting, shape, self._vocabulary, log)
            self._kept[peer.name] = self._stack.enter_context(start)
        kept = self._kept[peer.name]
        kept.group.thaw()
        try:
            yield kept
        finally:
            kept.group.freeze()


def _shown(sample: Sample) -> str:
    told = sample.figures
    if told is None:
        return f"failed: {sample.error}"
    rates = f"{told.tokens_per_second:7.1f} tokens/s  TTFT {told.ttft:6.0f} ms  ITL {told.itl:5.1f} ms"
    return f"{rates}  others {sample.others:4.0%}"
