"""The trained hybrid: Mamba-2, windows and full attention in a model that writes words."""

import json
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tenuto
from tenuto.base.groups import Kind
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.torch_forward import TorchForward
from tenuto.models.decoder import Decoder
from tenuto.models.hf import HfCheckpoint
from tenuto.text.load import load_tokenizer
from tests.exec.kernels import KERNELS
from tests.exec.mixed_driver import MixedDriver
from tests.hybrid.net import Net
from tests.hybrid.train import written

MODEL = Path(__file__).parent / "model"


def test_the_model_is_small_and_has_every_kind_of_memory() -> None:
    weights = load_file(MODEL / "model.safetensors")
    assert sum(tensor.numel() for tensor in weights.values()) <= 2_000_000
    assert (MODEL / "model.safetensors").stat().st_size <= 4_000_000
    checkpoint = HfCheckpoint(MODEL)
    decoder = Decoder(checkpoint.config, checkpoint.weights(), torch.device("cpu"), torch.float32)
    assert [group.kind for group in TorchForward(decoder, 16).spec.groups] == [Kind.STATE, Kind.SLIDING, Kind.FULL]


def test_the_served_model_is_the_trained_model() -> None:
    checkpoint = HfCheckpoint(MODEL)
    net = Net(checkpoint.config)
    net.load_state_dict({name: value.float() for name, value in load_file(MODEL / "model.safetensors").items()})
    tokens = np.random.default_rng(0).integers(0, checkpoint.config.vocab, 150).tolist()
    with torch.inference_mode():
        expected = net(torch.tensor([tokens]))[0]
    decoder = Decoder(checkpoint.config, checkpoint.weights(), torch.device("cpu"), torch.float32)
    executor = ModelExecutor(TorchForward(decoder, 16))
    driver = MixedDriver(executor, rows=1)
    found = torch.cat([driver.logits({0: tokens[a:b]}) for a, b in ((0, 70), (70, 71), (71, 150))])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    executor.close()


def test_the_model_knows_words() -> None:
    """In nats a token; choosing among all 2048 would be 7.6."""
    checkpoint, tokenizer = HfCheckpoint(MODEL), load_tokenizer(MODEL)
    documented = (json.dump, Path.exists, textwrap.dedent, shutil.move)
    texts = [
        written([(f"What does {it.__name__} do?", " ".join((it.__doc__ or "").split("\n\n")[0].split()))])
        for it in documented
    ]
    tokens = [tokenizer.encode(text, special=True)[:200] for text in texts]
    net = Net(checkpoint.config)
    net.load_state_dict({name: value.float() for name, value in load_file(MODEL / "model.safetensors").items()})
    with torch.inference_mode():
        losses = [
            torch.nn.functional.cross_entropy(net(torch.tensor([text[:-1]]))[0], torch.tensor(text[1:])).item()
            for text in tokens
        ]
    assert sum(losses) / len(losses) < 3.0


@pytest.fixture(scope="module", params=KERNELS)
def engine(request: pytest.FixtureRequest) -> Iterator[tenuto.Engine]:
    with tenuto.Engine(str(MODEL), kernels=request.param, context_length=1024, audit_every=1) as running:
        yield running
        running.audit()


def test_chats_fork_and_rewind_and_repeat_their_answers(engine: tenuto.Engine) -> None:
    session = engine.session()
    first = session.chat("What does json.dump do?", max_new_tokens=24).result()
    history = session.history
    second = session.chat("Go on.", max_new_tokens=24)
    said = second.result().usage.generated, second.text
    assert "".join(letter for letter in second.text if letter.isalpha())
    fork = session.fork(turn=1)
    assert fork.history == history
    again = fork.chat("Go on.", max_new_tokens=24)
    assert (again.result().usage.generated, again.text) == said
    assert again.result().usage.cached >= len(history) - 1
    session.rewind(turn=1)
    repeated = session.chat("Go on.", max_new_tokens=24)
    assert (repeated.result().usage.generated, repeated.text) == said
    assert first.usage.generated > 1
