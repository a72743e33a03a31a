"""Chat on sessions: after any abort, rewind, fork or interruption, the next message is rendered against the actual
history. Tokenizer and template are real; the witness generates random text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tenuto
from tenuto.base.config import WorkerSettings
from tenuto.base.errors import IllegalTransition, InvalidRequest
from tenuto.base.groups import GroupSpec, Kind
from tenuto.base.turns import Message
from tenuto.exec.witness import WitnessExecutor
from tenuto.runtime.models import Model
from tenuto.text.chat import ChatTemplate
from tenuto.text.load import load_tokenizer

Said = tuple[str, list[int]]
"""A user message, and the tokens of the answer."""


@pytest.fixture(scope="module")
def template(smollm2_path: Path) -> ChatTemplate:
    tokenizer = load_tokenizer(smollm2_path)
    assert tokenizer.chat_template is not None
    return ChatTemplate(tokenizer.chat_template, tokenizer)


@pytest.fixture(scope="module")
def engine(smollm2_path: Path, template: ChatTemplate) -> Iterator[tenuto.Engine]:
    tokenizer = load_tokenizer(smollm2_path)

    def load(settings: WorkerSettings) -> Model:
        executor = WitnessExecutor(settings.page_size, [GroupSpec(Kind.FULL, 64)], tokenizer.vocab_size)
        return Model(executor, tokenizer.vocab_size, tokenizer.eos_ids, 100_000, tokenizer, template)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tenuto.api.transport.load_model", load)
        opened = tenuto.Engine("any", page_size=4, context_length=50_000, audit_every=5)
    with opened:
        yield opened
        opened.audit()


def rendered(template: ChatTemplate, system: str | None, turns: list[Said]) -> list[int]:
    """Returns the naive history: every turn rendered after all before it."""
    history: list[int] = []
    conversation = None
    for text, answer in turns:
        messages = [Message("user", text)]
        if conversation is None:
            opening = [Message("system", system), *messages] if system is not None else messages
            tokens, conversation = template.opening(opening)
        else:
            tokens, conversation = template.delta(conversation, messages, last_token=history[-1])
        history += tokens + answer
    return history


steps = st.lists(
    st.tuples(
        st.sampled_from(["chat", "chat", "abort", "barge in", "rewind", "cut", "fork", "regenerate"]),
        st.integers(0, 5),
    ),
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(system=st.sampled_from([None, "Be brief."]), steps=steps)
def test_every_turn_follows_the_actual_history(
    engine: tenuto.Engine, template: ChatTemplate, system: str | None, steps: list[tuple[str, int]]
) -> None:
    session = engine.session(system=system)
    turns: list[Said] = []
    opened = [session]
    for number, (step, n) in enumerate([*steps, ("chat", 1)]):
        text = f"message {number}"
        if step == "chat":
            turn = session.chat(text, max_new_tokens=n + 1)
            turn.result()
            turns.append((text, turn.token_ids))
        elif step == "abort":
            turn = session.chat(text)
            next(turn.tokens())
            turn.abort()
        elif step == "barge in":
            turn = session.chat(text)
            next(turn.tokens())
            result = turn.abort(keep=n)
            turns.append((text, session.history[len(session.history) - result.kept :]))
            turns[-1] = (text, turns[-1][1] if result.kept else [])
        elif step == "rewind":
            turns = turns[: len(turns) - min(n, len(turns))]
            session.rewind(turn=len(turns))
        elif step == "cut" and turns:
            kept = min(n, len(turns[-1][1]))
            session.rewind(position=len(session.history) - len(turns[-1][1]) + kept)
            turns[-1] = (turns[-1][0], turns[-1][1][:kept])
        elif step == "fork":
            turns = turns[: max(0, len(turns) - n)]
            session = session.fork(turn=len(turns))
            opened.append(session)
        elif step == "regenerate" and turns and turns[-1][1]:
            turn = session.regenerate(max_new_tokens=n + 1)
            turn.result()
            turns[-1] = (turns[-1][0], turn.token_ids)
        assert session.history == rendered(template, system, turns)
    for one in opened:
        one.close()


def test_a_history_cut_inside_a_message_accepts_no_more_messages(engine: tenuto.Engine) -> None:
    session = engine.session()
    session.chat("hello", max_new_tokens=3).result()
    session.chat("hello again", max_new_tokens=3).result()
    inside = session.fork(position=session.info.tokens - 5)
    with pytest.raises(IllegalTransition, match="inside"):
        inside.chat("and again")
    inside.rewind(turn=1)
    assert inside.chat("and again", max_new_tokens=1).result().committed


def test_messages_do_not_follow_raw_text(engine: tenuto.Engine) -> None:
    session = engine.session()
    session.chat("hello", max_new_tokens=3).result()
    session.turn(" and so on", max_new_tokens=2).result()
    with pytest.raises(IllegalTransition, match="raw"):
        session.chat("hello again")
    with pytest.raises(InvalidRequest, match="system"):
        engine.session(system="Be brief.").turn("raw")


def test_messages_appended_without_an_answer_are_answered_by_an_empty_turn(
    engine: tenuto.Engine, template: ChatTemplate
) -> None:
    session = engine.session(system="Be brief.")
    session.append([{"role": "user", "content": "hello"}])
    samples = [session.fork() for _ in range(2)]
    for sample in samples:
        sample.turn(max_new_tokens=3).result()
        assert (
            sample.history[:-3] == template.opening([Message("system", "Be brief."), Message("user", "hello")]).tokens
        )
        before = sample.history
        sample.turn(max_new_tokens=2).result()  # the answer had not ended: it continues
        assert sample.history[:-2] == before


def test_a_draft_of_a_message_is_a_prefix_of_the_message(engine: tenuto.Engine) -> None:
    session = engine.session()
    session.draft([{"role": "user", "content": "What is the ca"}])
    turn = session.chat("What is the capital?", max_new_tokens=1)
    assert turn.result().committed
    plain = engine.session()
    plain.chat("What is the capital?", max_new_tokens=1).result()
    assert session.history == plain.history


def test_text_is_delivered_and_stop_strings_end_it(engine: tenuto.Engine) -> None:
    session = engine.session()
    first = session.turn("one", max_new_tokens=30)
    pieces = list(first)
    assert "".join(pieces) == first.text
    stop = first.text[10:14]
    again = engine.generate("one", stop=stop, max_new_tokens=30)
    assert "".join(again) == first.text[: first.text.index(stop)]
    assert again.result().reason.value == "stop"


def test_a_one_shot_chat_is_rendered_as_an_opening(engine: tenuto.Engine, template: ChatTemplate) -> None:
    turn = engine.generate([{"role": "user", "content": "hello"}], max_new_tokens=1)
    assert turn.result().usage.prompt == len(template.opening([Message("user", "hello")]).tokens)
