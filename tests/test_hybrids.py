"""Models with sliding-window and recurrent layers behind the Python interface: sessions support everything, and
generate what transformers generates from the same history."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedModel

import tenuto
from tests.models.tiny_dense import tiny_phi3
from tests.models.tiny_hybrids import VOCABULARY, tiny_bamba, tiny_gemma3, tiny_qwen3_next


def tokenizer_of(tokens: int) -> tokenizers.Tokenizer:
    """Makes a tokenizer of one token for each character; the tests use token ids."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:tokens]
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


@pytest.fixture(
    scope="module", params=[tiny_gemma3, tiny_bamba, tiny_qwen3_next, tiny_phi3], ids=lambda make: make.__name__
)
def reference(request: pytest.FixtureRequest) -> PreTrainedModel:
    return request.param()


@pytest.fixture
def engine(reference: PreTrainedModel, tmp_path: Path) -> Iterator[tenuto.Engine]:
    reference.save_pretrained(tmp_path)
    tokenizer_of(VOCABULARY).save(str(tmp_path / "tokenizer.json"))
    with tenuto.Engine(str(tmp_path), page_size=4, context_length=200, audit_every=1) as running:
        yield running
        running.audit()


@pytest.fixture
def said(reference: PreTrainedModel) -> Callable[[list[int], int], list[int]]:
    """Returns transformers' output after a history, computed from scratch for every token."""

    @torch.inference_mode()
    def say(history: list[int], count: int) -> list[int]:
        tokens = list(history)
        for _ in range(count):
            tokens.append(int(reference(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        return tokens[len(history) :]

    return say


def test_turns_forks_and_rewinds_generate_what_is_generated_from_scratch(
    engine: tenuto.Engine, said: Callable[[list[int], int], list[int]]
) -> None:
    session = engine.session()
    history: list[int] = []
    for number in range(3):
        given = [10 + number + i for i in range(7)]
        turn = session.turn(given, max_new_tokens=6, ignore_eos=True)
        history += given
        assert list(turn.tokens()) == said(history, 6)
        history += turn.token_ids
    fork = session.fork()
    assert list(fork.turn([77, 5], max_new_tokens=5, ignore_eos=True).tokens()) == said([*history, 77, 5], 5)
    session.rewind(position=17)
    assert list(session.turn([33], max_new_tokens=5, ignore_eos=True).tokens()) == said([*history[:17], 33], 5)
    first = said(history[:7], 6)
    session.rewind(position=13)
    assert session.history == history[:7] + first
    assert list(session.regenerate(max_new_tokens=6, ignore_eos=True).tokens()) == first
