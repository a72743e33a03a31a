"""Traces in the Trace Event Format of Chrome, which Perfetto reads, too.

Source: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

from typing import Any

from tenuto.base.map_views import TracedTurn, TraceView

ENGINE, TURNS = 1, 2
"""The processes of the trace: the engine, with its steps, and the turns, with a thread for each session."""


def chrome_trace(trace: TraceView, model: str) -> dict[str, Any]:
    """Returns the trace as a JSON document. Times are microseconds since its beginning."""
    threads: dict[tuple[str, str], int] = {}
    turns = {turn.number: turn for turn in trace.turns}
    for turn in sorted(turns.values(), key=lambda each: (each.tenant, each.session)):
        threads.setdefault((turn.tenant, turn.session), len(threads) + 1)
    events = [_name("process_name", ENGINE, 0, f"Tenuto: {model}"), _name("thread_name", ENGINE, 1, "steps")]
    events += [_name("process_name", TURNS, 0, "turns by session")]
    events += [_name("thread_name", TURNS, thread, session) for (_, session), thread in threads.items()]

    def micro(seconds: float) -> float:
        return round((seconds - trace.began) * 1e6, 1)

    def slice_of(turn: TracedTurn, name: str, began: float, ended: float, **more: Any) -> dict[str, Any]:
        return {
            "name": name,
            "cat": "turn",
            "ph": "X",
            "pid": TURNS,
            "tid": threads[turn.tenant, turn.session],
            "ts": micro(began),
            "dur": round(max(0.0, ended - began) * 1e6, 1),
            "args": {"turn": turn.number, **more},
        }

    last: dict[int, float] = {}  # when the last step of each turn ended
    sampled_before: set[int] = set()
    for step in trace.steps:
        tokens = sum(count for _, count, _ in step.turns)
        decodes = sum(sampled > 0 for _, _, sampled in step.turns)
        events.append(
            {
                "name": f"step {step.step}",
                "cat": "step",
                "ph": "X",
                "pid": ENGINE,
                "tid": 1,
                "ts": micro(step.began),
                "dur": round((step.ended - step.began) * 1e6, 1),
                "args": {"rows": len(step.turns), "tokens": tokens, "sampling": decodes},
            }
        )
        events.append(_counter("rows", micro(step.began), {"running": len(step.turns)}))
        for number, count, sampled in step.turns:
            turn = turns[number]
            if number not in last and turn.arrived < step.began:
                events.append(slice_of(turn, "queued", max(turn.arrived, trace.began), step.began))
            decoding = number in sampled_before or (count == 1 and sampled > 0)
            events.append(
                slice_of(turn, "decode" if decoding else "prefill", step.began, step.ended, tokens=count, step=step.step)
            )
            last[number] = step.ended
            if sampled:
                sampled_before.add(number)
    for number, turn in turns.items():
        if number not in last:
            events.append(slice_of(turn, "queued", max(turn.arrived, trace.began), trace.ended))
        elif turn.ended:
            events.append(
                {
                    **slice_of(turn, f"end: {turn.ended}", last[number], last[number], cached=turn.cached),
                    "ph": "i",
                    "s": "t",
                }
            )
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"began": trace.wall, "seconds": round(trace.ended - trace.began, 3), "incomplete": trace.more},
    }


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _counter(name: str, at: float, values: dict[str, int]) -> dict[str, Any]:
    return {"name": name, "ph": "C", "pid": ENGINE, "ts": at, "args": values}
