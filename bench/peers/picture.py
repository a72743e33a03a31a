"""The picture: throughput of every peer, and the time to the first token by turn of the longest conversation."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bench.peers.catalog import Peer
from bench.peers.report import Results
from bench.peers.workload import Shape
from bench.spread import Spread

OURS = "tab:blue"
OTHERS = "tab:gray"


def draw(results: Results, path: Path) -> None:
    """Draws the picture to `path`, as SVG. Equal results give equal files."""
    import matplotlib as mpl  # noqa: PLC0415 - only needed here
    from matplotlib.figure import Figure  # noqa: PLC0415

    mpl.rcParams.update({"svg.hashsalt": "tenuto", "font.size": 9})
    figure = Figure(figsize=(11, 7), layout="constrained")
    (upper,), (lower,) = figure.subfigures(2, 1, squeeze=False, height_ratios=(3, 4))
    panels = upper.subplots(1, len(results.shapes), squeeze=False, sharey=True)[0]
    for axes, shape in zip(panels, results.shapes, strict=True):
        _bars(axes, results, shape)
    _lines(lower.subplots(), results, max(results.shapes, key=lambda shape: shape.turns))
    figure.savefig(path, format="svg", metadata={"Date": None})


def _bars(axes: Any, results: Results, shape: Shape) -> None:
    """Draws bars of the median tokens per second, with a thin line from minimum to maximum."""
    peers = results.peers[::-1]
    for position, peer in enumerate(peers):
        rates = [sample.figures.tokens_per_second for sample in results.of(peer, shape) if sample.figures is not None]
        if rates:
            rate = Spread.of(rates)
            reach = [[rate.median - rate.low], [rate.high - rate.median]]
            axes.barh(position, rate.median, xerr=reach, color=_color(peer), error_kw={"linewidth": 0.8})
    axes.set_yticks(range(len(peers)), [peer.title.replace("`", "") for peer in peers])
    axes.set_title(f"{shape.sessions} x {shape.turns} turns")
    axes.set_xlabel("generated tokens/s")


def _lines(axes: Any, results: Results, shape: Shape) -> None:
    """Draws the TTFT by turn, the median over the rounds."""
    for peer in results.peers:
        runs = [sample.figures.ttft_by_turn for sample in results.of(peer, shape) if sample.figures is not None]
        if runs:
            times = [statistics.median(turn) for turn in zip(*runs, strict=True)]
            axes.plot(range(1, len(times) + 1), times, label=peer.title.replace("`", ""), linewidth=1.5)
    axes.set_yscale("log")
    axes.set_ylabel("time to first token, ms")
    axes.set_xlabel(f"turn, of {shape.sessions} session{'s' * (shape.sessions > 1)}")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes.grid(visible=True, which="both", linewidth=0.3)


def _color(peer: Peer) -> str:
    return OURS if peer.name.startswith("tenuto") else OTHERS
