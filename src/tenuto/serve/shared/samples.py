"""Several answers to one prompt. A prefill-only turn on a hidden session computes the prompt once; then the session is
forked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import msgspec

from tenuto.base.errors import DeadlinePassed, Draining, GrammarFailed, TurnAborted, TurnFailed
from tenuto.base.options import OF_PREFILL, TurnParams
from tenuto.base.sampling import MAX_SEED
from tenuto.base.turns import EndReason, TurnResult
from tenuto.base.views import hidden_session_id
from tenuto.base.wire.messages import CloseSession, Fork, StartTurn
from tenuto.serve.shared.edge import Edge, Start, open_message
from tenuto.serve.shared.live_turn import LiveTurn
from tenuto.serve.shared.settings import Tenant
from tenuto.serve.shared.tasks import all_of

MAX_SAMPLES = 128
"""Maximum number of answers to one prompt."""
HIDDEN_TTL = 300.0
"""Seconds after which an idle hidden session closes, should nothing else close it."""


class Samples:
    """The turns that answer one prompt, begun by `start`. The creator must call `close` in the end, also after errors.

    Several turns run on hidden sessions of the tenant.
    """

    def __init__(self, edge: Edge, tenant: Tenant, start: Start) -> None:
        self.turns: list[LiveTurn] = []
        self.prompt: LiveTurn | None = None  # the turn that computed the prompt, if there are several samples
        self._edge = edge
        self._tenant = tenant
        self._start = start
        self._sessions: list[str] = []  # ids of hidden sessions that may be open

    @classmethod
    def of(cls, edge: Edge, tenant: Tenant, turn: LiveTurn) -> Samples:
        """Returns a turn that has started as the only sample."""
        samples = cls(edge, tenant, partial(edge.start, tenant))
        samples.turns.append(turn)
        return samples

    @property
    def input_turn(self) -> LiveTurn:
        """The turn whose ticket and input scores belong to the prompt."""
        return self.prompt if self.prompt is not None else self.turns[0]

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt. Valid once all turns have ended."""
        return max(turn.result.usage.prompt for turn in self.turns if turn.result is not None)

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that did not have to be computed. Valid once all turns have ended."""
        result = self.input_turn.result
        return result.usage.cached if result is not None else 0

    @property
    def generated_tokens(self) -> int:
        """Number of tokens of all answers. Valid once all turns have ended."""
        return sum(turn.result.usage.generated for turn in self.turns if turn.result is not None)

    @property
    def guessed_tokens(self) -> tuple[int, int]:
        """Numbers of guessed tokens of all answers that were accepted, and of those that were rejected. Valid once all
        turns have ended."""
        usages = [turn.result.usage for turn in self.turns if turn.result is not None]
        return sum(usage.accepted for usage in usages), sum(usage.rejected for usage in usages)

    async def start(self, request: StartTurn, n: int = 1) -> None:
        """Starts `n` turns and returns when the engine has accepted them. If `n` is more than 1, `request` must not
        name a session, and each sample's seed is one more than the previous one's."""
        if n == 1:
            self.turns.append(await self._start(request))
            return
        root = hidden_session_id()
        await self._open(root, request)
        params = request.params.output_alone
        sampling = params.sampling

        async def sample(i: int) -> LiveTurn:
            session = root if i == 0 else await self._fork(root, f"{root}-{i}")
            own = replace(params, sampling=replace(sampling, seed=(sampling.seed + i) & MAX_SEED))
            start = msgspec.structs.replace(request, session=session, input=[], params=own, echo=False)
            return await self._start(start)

        self.turns = await all_of(sample(i) for i in range(n))

    async def _open(self, root: str, request: StartTurn) -> None:
        """Opens a hidden session and commits the prompt to its history."""
        self._sessions.append(root)
        opening = open_message(self._tenant, root, ttl=HIDDEN_TTL, adapter=request.adapter, hidden=True)
        await self._edge.link.call(opening)
        params = TurnParams(**{name: getattr(request.params, name) for name in OF_PREFILL})
        append = msgspec.structs.replace(request, kind="append", session=root, params=params)
        self.prompt = await self._start(append)
        await committed(self._edge, self.prompt)

    async def _fork(self, root: str, child: str) -> str:
        tenant = self._tenant
        self._sessions.append(child)
        fork = Fork(tenant=tenant.name, session=root, child=child, limits=tenant.limits)
        return (await self._edge.link.call(fork)).session_id

    def close(self) -> None:
        """Aborts open turns that have no other readers, and closes hidden sessions."""
        sessions, self._sessions = self._sessions, []
        if sessions:
            self._edge.spawn(self._close(sessions))  # also aborts their turns
        else:
            for turn in self.turns:
                self._edge.turns.abandon(turn)

    async def _close(self, sessions: list[str]) -> None:
        """Closes sessions. The engine gets these messages after the ones that open the sessions."""
        closing = [CloseSession(tenant=self._tenant.name, session=session) for session in sessions]
        await asyncio.gather(*map(self._edge.link.call, closing), return_exceptions=True)


async def start_all(edge: Edge, tenant: Tenant, requests: Iterable[StartTurn], n: int = 1) -> list[Samples]:
    """Starts the samples of several prompts. The caller closes them; if some cannot start, all are closed."""
    requests = list(requests)
    with edge.places(tenant, n * len(requests)) as start:
        all_samples = [Samples(edge, tenant, start) for _ in requests]
        try:
            await all_of(samples.start(request, n) for samples, request in zip(all_samples, requests, strict=True))
        except BaseException:
            close_all(all_samples)
            raise
    return all_samples


def close_all(all_samples: Iterable[Samples]) -> None:
    """See `Samples.close`."""
    for samples in all_samples:
        samples.close()


async def committed(edge: Edge, turn: LiveTurn) -> TurnResult:
    """Waits for the turn's end and returns its result. Raises an error if the turn was rolled back."""
    result = await turn.finished()
    check_end(edge, result)
    return result


def check_end(edge: Edge, result: TurnResult) -> None:
    """Raises an error with the reason if the turn was rolled back."""
    if result.committed:
        return
    if result.reason is EndReason.DEADLINE:
        raise DeadlinePassed("the turn did not start or end by its deadline, and was rolled back")
    if result.reason is EndReason.GRAMMAR:
        raise GrammarFailed(
            "the grammar is too complex to be followed further, or bad_words leave no token that it allows; "
            "the turn was rolled back"
        )
    if result.reason is EndReason.FAILED:
        raise TurnFailed("the steps with the turn failed, and it was rolled back; try again")
    if edge.draining:
        raise Draining("the server is shutting down, and the turn was rolled back; try again later")
    raise TurnAborted("the turn was aborted and rolled back")
