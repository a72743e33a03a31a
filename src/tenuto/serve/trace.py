"""Traces in the Trace Event Format of Chrome, which Perfetto reads, too.

Source: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

from typing import Any

from tenuto.base.map_views import TracedStep, TracedTurn, TraceView

ENGINE, TURNS = 1, 2
"""The processes of a trace: the engine, with its steps, and the turns, with a thread for each session."""


def chrome_trace(trace: TraceView, model: str) -> dict[str, Any]:
    """Returns the trace as a JSON document. Times are microseconds since its beginning."""
    return {
        "traceEvents": _Events(trace, model).all(),
        "displayTimeUnit": "ms",
        "otherData": {"began": trace.wall, "seconds": round(trace.ended - trace.began, 3), "incomplete": trace.more},
    }


class _Events:
    """The events of one trace."""

    def __init__(self, trace: TraceView, model: str) -> None:
        self._trace = trace
        self._turns = {turn.number: turn for turn in trace.turns}
        self._threads: dict[tuple[str, str], int] = {}
        for turn in sorted(trace.turns, key=lambda each: (each.tenant, each.session)):
            self._threads.setdefault((turn.tenant, turn.session), len(self._threads) + 1)
        self._ended: dict[int, float] = {}  # when the last step of each turn ended
        self._sampled: set[int] = set()  # turns that have output
        self._events = [_name("process_name", ENGINE, 0, f"Tenuto: {model}"), _name("thread_name", ENGINE, 1, "steps")]
        self._events.append(_name("process_name", TURNS, 0, "turns by session"))
        self._events += [_name("thread_name", TURNS, thread, key[1]) for key, thread in self._threads.items()]

    def all(self) -> list[dict[str, Any]]:
        for step in self._trace.steps:
            self._step(step)
        for number, turn in self._turns.items():
            if number not in self._ended:
                self._slice(turn, "queued", turn.arrived, self._trace.ended)
            elif turn.ended:
                event = self._event("i", TURNS, self._thread(turn), f"end: {turn.ended}", self._ended[number])
                self._events.append({**event, "s": "t", "args": {"turn": number, "cached": turn.cached}})
        return self._events

    def _step(self, step: TracedStep) -> None:
        args = {
            "rows": len(step.turns),
            "tokens": sum(count for _, count, _ in step.turns),
            "sampling": sum(sampled > 0 for _, _, sampled in step.turns),
        }
        event = self._event("X", ENGINE, 1, f"step {step.step}", step.began, step.ended)
        counter = self._event("C", ENGINE, 0, "rows", step.began)
        self._events += [{**event, "args": args}, {**counter, "args": {"running": len(step.turns)}}]
        for number, count, sampled in step.turns:
            turn = self._turns[number]
            if number not in self._ended and turn.arrived > self._trace.began:
                self._slice(turn, "queued", turn.arrived, step.began)
            decodes = number in self._sampled or (count == 1 and sampled > 0)
            self._slice(turn, "decode" if decodes else "prefill", step.began, step.ended, tokens=count, step=step.step)
            self._ended[number] = step.ended
            if sampled:
                self._sampled.add(number)

    def _slice(self, turn: TracedTurn, name: str, began: float, ended: float, **more: int) -> None:
        event = self._event("X", TURNS, self._thread(turn), name, began, ended)
        self._events.append({**event, "args": {"turn": turn.number, **more}})

    def _thread(self, turn: TracedTurn) -> int:
        return self._threads[turn.tenant, turn.session]

    def _event(
        self, kind: str, process: int, thread: int, name: str, began: float, ended: float | None = None
    ) -> dict[str, Any]:
        event: dict[str, Any] = {
            "name": name,
            "cat": "tenuto",
            "ph": kind,
            "pid": process,
            "tid": thread,
            "ts": self._micro(began),
        }
        if ended is not None:
            event["dur"] = max(0.0, round(self._micro(ended) - event["ts"], 1))
        return event

    def _micro(self, moment: float) -> float:
        """Returns microseconds since the beginning of the trace; a step may have begun before."""
        return round(max(0.0, moment - self._trace.began) * 1e6, 1)


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
