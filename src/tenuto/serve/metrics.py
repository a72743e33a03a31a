"""Prometheus metrics: the edge's own counts, and figures that the engine reports on request.

Label values come from the configuration, the routes or the code, so they are few. Sessions, turns and clients are never
labels.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tenuto.base.errors import TenutoError
from tenuto.base.turns import Delta
from tenuto.base.views import AuditReport, Stats, Transition
from tenuto.base.wire.link import Link
from tenuto.base.wire.messages import Audit, GetStats
from tenuto.serve.shared.live_turn import LiveTurn

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
AUDIT_SECONDS = 10.0
"""Maximum age of a recount of memory, so that frequent scrapes cost little."""
PATIENCE_SECONDS = 5.0
"""Time the engine has to answer: steps may be long, and Prometheus gives up after 10 s."""
TIER = "device"
"""The tier of all counted units."""

_FIRST = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 0.75, 1, 2, 4, 8, 15, 30, 60, 120)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 8, 12, 20, 30, 60, 120, 240, 600, 1800)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

Series = Iterable[tuple[tuple[str, ...], float]]


class Metrics:
    """The server's metrics, used from one event loop. An update of a turn costs a few microseconds."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call] # they add a line to every metric
        self.registry = registry = CollectorRegistry()
        self._last_tokens: dict[str, float] = {}  # when an open turn's last tokens arrived, by turn id
        ProcessCollector(registry=registry)
        self._engine = _EngineFigures()
        registry.register(self._engine)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"tenuto_{name}_seconds", text, buckets=buckets, registry=registry)

        self._first = histogram("time_to_first_token", "From a turn's request to its first token", _FIRST)
        self._queue = histogram("queue_time", "From a turn's request until it began to compute", _FIRST)
        self._between = histogram("inter_token_latency", "From a turn's token to its next", _BETWEEN)
        self._whole = histogram("e2e_turn_latency", "From a turn's request to its end", _WHOLE)
        self._ended = Counter(
            "tenuto_turns_ended", "Accepted turns that have ended", ("reason", "committed"), registry=registry
        )
        self._moves = Counter(
            "tenuto_fleet_moves", "Moves of sessions to other replicas, by outcome", ("outcome",), registry=registry
        )
        self._moving = histogram("fleet_move", "From the beginning of a move to its end", _WHOLE)
        self._requests = Counter(
            "tenuto_http_requests", "HTTP requests answered", ("method", "route", "status"), registry=registry
        )
        text = "Requests that another replica of the fleet was asked to answer"
        self._forwarded = Counter("tenuto_forwarded_requests", text, registry=registry)

    def turn_updated(self, turn: LiveTurn, delta: Delta) -> None:
        """Counts a delta. Tokens that arrive together count as evenly spaced."""
        tokens = len(delta.tokens)
        if not tokens:
            return
        now = time.perf_counter()
        before = self._last_tokens.get(turn.id)
        if before is None:
            self._first.observe(now - turn.requested_at)
        else:
            gap = (now - before) / tokens
            for _ in range(tokens):
                self._between.observe(gap)
        self._last_tokens[turn.id] = now

    def turn_ended(self, turn: LiveTurn) -> None:
        """Counts an accepted turn that has ended."""
        self._last_tokens.pop(turn.id, None)
        reason = turn.result.reason.value if turn.result is not None else "engine_stopped"
        self._ended.labels(reason, str(turn.committed).lower()).inc()
        self._whole.observe(time.perf_counter() - turn.requested_at)
        if turn.waited is not None:
            self._queue.observe(turn.waited)

    def turn_moved(self, turn: LiveTurn) -> None:
        """Counts no more of a turn that goes on at another replica."""
        self._last_tokens.pop(turn.id, None)

    def session_moved(self, outcome: str, seconds: float) -> None:
        """Counts a move of a session to another replica."""
        self._moves.labels(outcome).inc()
        self._moving.observe(seconds)

    def request_ended(self, method: str, route: str | None, status: int) -> None:
        """Counts an answered request. `route`: the path with its parameters' names, or `None` if no route matched."""
        self._requests.labels(method if method in _METHODS else "other", route or "none", str(status)).inc()

    def request_forwarded(self) -> None:
        """Counts a request for a session of another replica."""
        self._forwarded.inc()

    async def text(self, link: Link, model: str, waiting: int) -> bytes:
        """Returns all metrics in Prometheus's text format, without the engine's if it has stopped or is late.
        `waiting`: number of turns that wait for another turn of their session."""
        self._engine.model, self._engine.waiting = model, waiting
        await self._engine.refresh(link)
        return generate_latest(self.registry)


class _EngineFigures(Collector):
    """The engine's last report, as metrics."""

    def __init__(self) -> None:
        self.model = ""
        self.waiting = 0
        self._up = False
        self._stats: Stats | None = None
        self._audit: AuditReport | None = None
        self._audited = -AUDIT_SECONDS

    async def refresh(self, link: Link) -> None:
        """Requests a new report from the engine."""
        self._stats = None
        with suppress(TenutoError, TimeoutError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                self._stats = await link.call(GetStats())
                if time.monotonic() - self._audited >= AUDIT_SECONDS:
                    self._audited = time.monotonic()
                    self._audit = await link.call(Audit())
        self._up = link.stopped is None

    def describe(self) -> Iterator[Metric]:
        """Returns no metrics: these cannot be collected during registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        yield _gauge(
            "build_info", "Running version and model", [((version("tenuto"), self.model), 1)], "version", "model"
        )
        yield _gauge("engine_up", "Whether the engine runs", [((), self._up)])
        yield _gauge("turns_waiting", "Turns that wait for another turn of their session", [((), self.waiting)])
        if self._stats is not None:
            yield from _current(self._stats)
            yield from _memory(self._stats, self._audit)
            yield from _totals(self._stats)


def _current(stats: Stats) -> Iterator[Metric]:
    yield _gauge("turns_running", "Turns in the running batch", [((), stats.running)])
    yield _gauge("turns_queued", "Turns that wait for the running batch", [((), stats.queued)])
    yield _gauge("sessions_open", "Open sessions", [((), stats.sessions)])
    yield _gauge("held_tokens", "Committed tokens of open sessions", _by_name(stats.held_tokens), "tenant")


def _memory(stats: Stats, audit: AuditReport | None) -> Iterator[Metric]:
    states = [
        ((pool.name, TIER, state), count)
        for pool in stats.pools
        for state, count in (("free", pool.free), ("in_flight", pool.in_flight), ("leased", pool.leased))
    ]
    yield _gauge("memory_units", "Units of memory", states, "group", "tier", "state")
    if audit is not None:
        held = [((pool.name, TIER, holder), count) for pool in audit.pools for holder, count in pool.by_holder.items()]
        text = f"Leased units by holder (shared: several holders), up to {AUDIT_SECONDS:g} seconds old"
        yield _gauge("memory_leased_units", text, held, "group", "tier", "holder")
        cached = [((pool.name, TIER), pool.cached) for pool in audit.pools]
        text = "Leased units held only by checkpoints that save work; they are the first to be released"
        yield _gauge("memory_cached_units", text, cached, "group", "tier")


def _totals(stats: Stats) -> Iterator[Metric]:
    events = collections.Counter[str]()
    for transition, count in stats.transitions.items():
        events[transition.operation] += count
    yield _counter("prompt_tokens", "Prompt tokens of ended turns", [((), stats.prompt_tokens)])
    yield _counter("cached_tokens", "Prompt tokens that were not computed again", [((), stats.cached_tokens)])
    yield _counter("computed_tokens", "Tokens computed for ended turns", [((), stats.computed_tokens)])
    yield _counter("generation_tokens", "Tokens generated by ended turns", [((), stats.generated_tokens)])
    guessed = [
        ((outcome, source), count)
        for outcome, counts in (("accepted", stats.accepted_tokens), ("rejected", stats.rejected_tokens))
        for source, count in counts.items()
    ]
    yield _counter("guessed_tokens", "Guessed tokens by outcome and source", guessed, "outcome", "source")
    yield _counter("recomputed_tokens", "Tokens computed again, by reason", _by_name(stats.recomputed), "reason")
    text = "Tokens in memory that were computed again after a rewind or fork, for lack of a nearer checkpoint"
    yield _counter("replayed_tokens", text, _by_name(stats.replayed), "operation")
    text = "Turns that lacked at least a page, by the owner of the prefix found, or the reason for finding no prefix"
    yield _counter("prefix_lookups", text, _by_name(stats.prefix_lookups), "outcome")
    yield _counter("prefix_tokens", "Tokens found in other sessions' memory", _by_name(stats.prefix_tokens), "owner")
    yield _gauge("parked_sessions", "Sessions with memory in a tier", [((), stats.parked)])
    yield _gauge("tier_bytes", "Bytes that parked sessions hold", _by_name(stats.tiers), "tier")
    yield _counter("restored_sessions", "Sessions brought back from a tier", [((), stats.restored)])
    yield _counter("moved_units", "Units copied, by destination", _by_name(stats.tier_moves), "tier")
    yield _counter("tier_failures", "Copies, writes and reads that failed", _by_name(stats.tier_failures), "cause")
    text = "Sessions whose memory was left on disk for the next process or found there, by outcome"
    yield _counter("snapshots", text, _by_name(stats.snapshots), "outcome")
    yield _gauge("saved_sessions", "Sessions with state on disk for the next process", [((), stats.saved)])
    yield _gauge("unsaved_sessions", "Sessions whose latest state waits to be written", [((), stats.unsaved)])
    yield _counter("saved_bytes", "Bytes of state written for the next process", [((), stats.saved_bytes)])
    text = "Bytes that were copied to the fleet's shared tier, or read there"
    yield _counter("shared_tier_bytes", text, _by_name(stats.shared.moved), "direction")
    text = "Requests to the shared tier that failed, by what they were to do"
    yield _counter("shared_tier_failures", text, _by_name(stats.shared.failures), "operation")
    text = "Sessions whose saved state waits to be copied to the shared tier, or to be removed there"
    yield _gauge("shared_tier_waiting", text, [((), stats.shared.waiting)])
    yield _counter("steps", "Steps", [((), stats.steps)])
    yield _counter("failed_steps", "Steps that the device did not finish", [((), events["step failed"])])
    yield _counter("preemptions", "Running turns that had to yield", [((), events["preempt"])])
    yield _counter("aborts", "Turns that were ended from outside", [((), events["abort"] + events["barge-in"])])
    yield _counter("transitions", "Transitions of sessions and turns", _by_name(stats.transitions), "event")


def _by_name(counts: Mapping[str, int] | Mapping[Transition, int]) -> Series:
    return [((str(name),), count) for name, count in counts.items()]


def _gauge(name: str, text: str, samples: Series, *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(f"tenuto_{name}", text, labels=labels), samples)


def _counter(name: str, text: str, samples: Series, *labels: str) -> Metric:
    return _filled(CounterMetricFamily(f"tenuto_{name}", text, labels=labels), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Series) -> Metric:
    for labels, value in samples:
        family.add_metric(labels, value)
    return family
