"""The command `tenuto bench`: runs sessions of several turns and times them like a client."""

from __future__ import annotations

import asyncio
import json
import math
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import msgspec
import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tenuto.base.checks import shown
from tenuto.base.errors import InvalidRequest, TenutoError
from tenuto.cli.bench_apis import APIS, BenchConversation, BenchRequest, Counts
from tenuto.cli.bench_http import BenchHttp
from tenuto.cli.tables import printable, show_table
from tenuto.client.connection import checked_url

TOKEN_IDS = range(100, 1000)
"""The token ids used in inputs, which exist in every vocabulary."""


@dataclass(frozen=True, slots=True)
class Workload:
    """`sessions` with `turns` turns each. Lengths are in tokens, or in words where an interface takes only text;
    `first_input` is the length of each session's first input. Between turns a session pauses for `think` seconds, plus
    or minus half. At most `concurrency` turns run at once."""

    sessions: int
    turns: int
    first_input: int
    input: int
    output: int
    think: float
    concurrency: int
    seed: int

    def inputs(self, session: int) -> list[list[int]]:
        """Returns a session's inputs, which are the same in every run."""
        draw = random.Random(f"{self.seed}/{session}")  # noqa: S311 - data, not secrets
        lengths = [self.first_input, *[self.input] * (self.turns - 1)]
        return [draw.choices(TOKEN_IDS, k=length) for length in lengths]

    def pauses(self, session: int) -> list[float]:
        """Returns a session's pause before each turn, in seconds."""
        draw = random.Random(f"{self.seed}/{session}/think")  # noqa: S311 - data, not secrets
        return [0.0, *(self.think * draw.uniform(0.5, 1.5) for _ in range(self.turns - 1))]


@dataclass(slots=True)
class Timed:
    """One turn: its `number` in its session, the length `new` of its input, the seconds `first` and `gaps` (see
    `timing`), the server's counts or the error, and when it `began`, in seconds of the clock that timed it."""

    number: int
    new: int
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    counts: Counts | None = None
    error: str | None = None
    began: float = 0.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one turn number over all sessions: mean token counts, and percentiles, in seconds, of the time to the
    first token (`ttft`) and of the gaps between later ones (`itl`). `ended`: number of turns that succeeded."""

    turn: int
    ended: int
    context: float | None
    new: float
    cached: float | None
    ttft_p50: float | None
    ttft_p95: float | None
    itl_p50: float | None
    itl_p95: float | None


@dataclass(frozen=True, slots=True)
class Totals:
    """Figures of a whole run. `errors`: number of turns that failed with each error. `left_out`: turns not started
    because an earlier turn of their session failed."""

    seconds: float
    turns: int
    turns_per_second: float
    output_tokens: int
    output_tokens_per_second: float
    left_out: int
    errors: dict[str, int]


def run_bench(
    url: str, api_key: str | None, api: str, history: str | None, workload: Workload, *, as_json: bool
) -> None:
    """Runs the workload and shows its figures. Raises `InvalidRequest` for a wrong `url`, `api` or `history`, and
    `TenutoError` if no turn succeeds."""
    if api not in APIS:
        raise InvalidRequest(f"api is {shown(api)}; allowed: {', '.join(APIS)}")
    history = history or APIS[api].histories[0]
    base = checked_url(url)
    if history not in APIS[api].histories:
        raise InvalidRequest(f"history is {shown(history)}; allowed: {', '.join(APIS[api].histories)}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, _progress() as progress:
        task = progress.add_task("turns", total=workload.sessions * workload.turns)
        timed, seconds = runner.run(
            measure(base, api_key, APIS[api], history, workload, lambda: progress.advance(task))
        )
    figures = [figures_of(number, timed) for number in range(1, workload.turns + 1)]
    totals = totals_of(timed, seconds, workload)
    if as_json:
        head = {"url": url, "api": api, "history": history, "workload": asdict(workload)}
        typer.echo(json.dumps({**head, "turns": [asdict(one) for one in figures], "totals": asdict(totals)}, indent=2))
    else:
        _show(figures, totals)
    if not totals.turns:
        raise TenutoError(f"no turn succeeded: {next(iter(totals.errors), 'there were no turns')}")


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())


async def measure(
    url: httpx.URL,
    api_key: str | None,
    kind: type[BenchConversation],
    history: str,
    workload: Workload,
    advance: Callable[[], None],
) -> tuple[list[Timed], float]:
    """Runs all turns; returns them and the duration of the whole run in seconds. Calls `advance` after each turn."""
    running = asyncio.Semaphore(workload.concurrency)
    timed: list[Timed] = []
    async with BenchHttp(url, api_key) as http:
        request = BenchRequest(history, workload.output, await _model(kind, http))
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(workload.sessions):
                conversation = kind(http, request, f"bench-{secrets.token_hex(8)}")
                group.create_task(_converse(conversation, workload, number, running, timed, advance))
        return timed, time.perf_counter() - began


async def _model(kind: type[BenchConversation], http: BenchHttp) -> str:
    try:
        return await kind.model(http)
    except (LookupError, TypeError) as error:
        raise TenutoError(f"{http.url} does not report its model's name: {error!r}") from error


async def _converse(
    conversation: BenchConversation,
    workload: Workload,
    session: int,
    running: asyncio.Semaphore,
    timed: list[Timed],
    advance: Callable[[], None],
) -> None:
    """Runs the turns of one session until one fails."""
    given = zip(workload.inputs(session), workload.pauses(session), strict=True)
    opened = False
    for number, (tokens, pause) in enumerate(given, 1):
        await asyncio.sleep(pause)
        turn = Timed(number, len(tokens))
        timed.append(turn)
        async with running:
            try:
                if not opened:
                    await conversation.open()
                    opened = True
                await _take_turn(conversation, tokens, turn)
            except TenutoError as error:
                turn.error = str(error)
            except (LookupError, TypeError, AttributeError, msgspec.DecodeError) as error:
                turn.error = f"the answer does not match this interface: {error!r}"
        advance()
        if turn.error is not None:
            break
    with suppress(TenutoError):
        await conversation.close()


async def _take_turn(conversation: BenchConversation, tokens: list[int], turn: Timed) -> None:
    turn.began = time.perf_counter()
    arrivals: dict[float, int] = {}
    async for item in conversation.turn(tokens):
        if isinstance(item, Counts):
            turn.counts = item
        else:
            arrivals[item.when] = arrivals.get(item.when, 0) + item.tokens
    if turn.counts is None:
        raise TenutoError("the answer ended before the turn")
    turn.first, turn.gaps = timing(turn.began, arrivals)


def timing(began: float, arrivals: Mapping[float, int]) -> tuple[float | None, list[float]]:
    """Returns the seconds from `began` to the first token, and the gaps between later tokens. `arrivals`: numbers of
    tokens by time of arrival. Tokens that arrived together share the gap before them equally."""
    times = [when for when, count in arrivals.items() if count]
    if not times:
        return None, []
    gaps = [0.0] * (arrivals[times[0]] - 1)
    for before, now in pairwise(times):
        gaps += [(now - before) / arrivals[now]] * arrivals[now]
    return times[0] - began, gaps


def figures_of(number: int, timed: Sequence[Timed]) -> Figures:
    """Returns the figures of the successful turns with this number."""
    turns = [turn for turn in timed if turn.number == number and turn.error is None]
    counts = [turn.counts for turn in turns if turn.counts is not None]
    first = [turn.first for turn in turns if turn.first is not None]
    gaps = [gap for turn in turns for gap in turn.gaps]
    return Figures(
        number,
        len(turns),
        _mean([count.prompt for count in counts if count.prompt is not None]),
        _mean([turn.new for turn in turns]) or 0.0,
        _mean([count.cached for count in counts if count.cached is not None]),
        quantile(first, 0.5),
        quantile(first, 0.95),
        quantile(gaps, 0.5),
        quantile(gaps, 0.95),
    )


def totals_of(timed: Sequence[Timed], seconds: float, workload: Workload) -> Totals:
    """Returns the figures of all turns."""
    good = [turn for turn in timed if turn.error is None]
    tokens = sum(turn.counts.generated or 0 for turn in good if turn.counts is not None)
    errors = Counter(turn.error for turn in timed if turn.error is not None)
    left_out = workload.sessions * workload.turns - len(timed)
    return Totals(seconds, len(good), len(good) / seconds, tokens, tokens / seconds, left_out, dict(errors))


def quantile(values: Sequence[float], share: float) -> float | None:
    """Returns the smallest of `values` that at least `share` of them do not exceed; `None` without values."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _show(figures: Sequence[Figures], totals: Totals) -> None:
    names = ["turn", "ended", "context", "new", "cached", "TTFT p50", "p95", "ITL p50", "p95"]
    show_table(names, [_row(one) for one in figures])
    typer.echo(
        f"\nTimes in ms. {totals.turns} turns in {totals.seconds:.2f} s: {totals.turns_per_second:.2f} turns/s, "
        f"{totals.output_tokens_per_second:.1f} output tokens/s; "
        f"{sum(totals.errors.values())} errors, {totals.left_out} turns left out after them"
    )
    for error, count in totals.errors.items():
        typer.echo(f"{count} x {printable(error)}", err=True)


def _row(one: Figures) -> list[str]:
    tokens = [_shown(value, "{:.0f}") for value in (one.context, one.new, one.cached)]
    times: list[Any] = [one.ttft_p50, one.ttft_p95, one.itl_p50, one.itl_p95]
    return [str(one.turn), str(one.ended), *tokens, *(_shown(value, "{:.2f}", 1000) for value in times)]


def _shown(value: float | None, form: str, scale: float = 1) -> str:
    return "-" if value is None else form.format(scale * value)
