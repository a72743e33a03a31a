"""Requests arrive as they were sent, and each names the type of its answer."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from tenuto.base.config import WorkerSettings
from tenuto.base.errors import ConfigError
from tenuto.base.options import Policy, TurnParams
from tenuto.base.sampling import Sampling
from tenuto.base.turns import Message
from tenuto.base.views import RecordPage, SessionInfo, SessionState
from tenuto.base.wire.messages import AnyRequest, CloseSession, GetSession, ListTurns, OpenSession, StartTurn
from tenuto.base.wire.request import answer_of


def test_every_request_names_the_type_of_its_answer() -> None:
    assert [answer_of(kind) for kind in (GetSession, CloseSession, ListTurns)] == [SessionInfo, type(None), RecordPage]
    for kind in get_args(AnyRequest):
        msgspec.msgpack.Decoder(answer_of(kind))


@pytest.mark.parametrize(
    "request_",
    [
        StartTurn(
            kind="append",
            tenant="t",
            session="s",
            input=[1, 2],
            params=TurnParams(
                max_new_tokens=9,
                sampling=Sampling(0.5, 4, seed=2**63 - 1, logit_bias=((7, -1.5),)),
                stop=("a",),
                stop_ids=(3,),
                timeout=2.5,
                logprobs=0,
            ),
        ),
        StartTurn(kind="turn", tenant="t", input=[Message("user", "hé"), Message("assistant", "")]),
        OpenSession(session="s", policy=Policy(3, 1.5, tenant="t", hidden=True, metadata=(("a", "b"),))),
    ],
)
def test_options_are_sent_unchanged(request_: StartTurn | OpenSession) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request_), type=AnyRequest) == request_


def test_every_request_can_be_decoded() -> None:
    kinds = {kind.__name__ for kind in get_args(AnyRequest)}
    assert {"Describe", "OpenSession", "GetSession", "Rewind", "Detokenize", "Withdraw"} <= kinds
    assert "OfSession" not in kinds


def test_a_session_view_is_sent_unchanged() -> None:
    info = SessionInfo("s", SessionState.OPEN, None, 1, 2, 30, 20, 70, 100, 0, None, 1.5, {"full": 3}, {"a": "b"})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=SessionInfo) == info


def test_engine_settings_are_checked_when_constructed() -> None:
    with pytest.raises(ConfigError, match="unknown engine options"):
        WorkerSettings(model="witness", config={"no_such_option": 1})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(ConfigError, match="token_budget"):
        WorkerSettings(model="witness", config={"max_running": 9, "token_budget": 9})
