"""Log-probabilities of SGLang's streams: every event has all entries so far, and each is serialized once."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.base.sampling import Candidate, TokenLogprob
from tenuto.base.turns import Delta, Transcript
from tenuto.serve.sglang import scores
from tenuto.serve.sglang.scores import OutputScores


def scored(token: int) -> TokenLogprob:
    return TokenLogprob(token, -0.5, (Candidate(token, -0.5, b"a"), Candidate(7, -1.5, b"\xff")), b"a")


def test_every_event_has_all_entries_and_each_is_serialized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    entry = scores.entry

    def counted(token: TokenLogprob | Candidate, *, text: bool) -> list[Any]:
        written.append(token.token)
        return entry(token, text=text)

    monkeypatch.setattr(scores, "entry", counted)
    reply, output = Transcript(), OutputScores()
    for event in range(1, 51):
        reply.take(Delta((event,), "a", event, logprobs=(scored(event),)))
        told = {name: bytes(raw) for name, raw in output.lists(reply, top=True, named=False, text=True).items()}
        one = ",".join(f'[-0.5,{n},"a"]' for n in range(1, event + 1))
        assert told["output_token_logprobs"].decode() == f"[{one}]"
        several = ",".join(f'[[-0.5,{n},"a"],[-1.5,7,"\ufffd"]]' for n in range(1, event + 1))
        assert told["output_top_logprobs"].decode() == f"[{several}]"
    assert len(written) == 3 * 50


def test_an_event_without_new_entries_repeats_the_old_ones() -> None:
    output = OutputScores()
    assert {
        name: bytes(raw) for name, raw in output.lists(Transcript(), top=False, named=False, text=True).items()
    } == {"output_token_logprobs": b"[]"}
