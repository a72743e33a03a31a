"""`python -m tests.hybrid.train_predictor` trains the head for multi-token prediction of the small hybrid again, in ten
minutes on one core. It learns what the hybrid would say next, with the texts that the hybrid was trained with.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional

from tenuto.models.config import ModelConfig
from tenuto.models.hf import HfCheckpoint
from tests.hybrid.corpus import conversations
from tests.hybrid.net import LayerNet, Net
from tests.hybrid.predictor import CONFIG, HEAD, MODEL
from tests.hybrid.train import LENGTH, WARMUP, written

STEPS, TEXTS, PEAK = 1600, 4, 5e-3
GUESSES = 2
"""The number of guesses that are trained, each from the output of the one before."""


class PredictorNet(nn.Module):
    """The head, without embeddings and output matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = nn.RMSNorm(config.hidden, config.norm_eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(config.hidden, config.norm_eps)
        self.fc = nn.Linear(2 * config.hidden, config.hidden, bias=False)
        self.layers = nn.ModuleList([LayerNet(replace(config, layers=config.predictor), 0)])
        self.norm = nn.RMSNorm(config.hidden, config.norm_eps)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.5 * parameter.shape[1] ** -0.5)

    def forward(self, embedded: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Maps the embeddings of next tokens and outputs, both [texts, length, hidden], to outputs."""
        joined = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(normed)], dim=2)
        out: torch.Tensor = self.norm(self.layers[0](self.fc(joined)))
        return out


def trained(net: Net, head: PredictorNet, tokens: torch.Tensor) -> None:
    """Trains the head on random pieces of `tokens`, int64 [n]."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=PEAK, betas=(0.9, 0.98), weight_decay=0.01)
    generator, embedding, right = torch.Generator().manual_seed(0), net.model.embed_tokens.weight, torch.zeros(GUESSES)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = PEAK * min((step + 1) / WARMUP, 1 - step / STEPS)
        starts = torch.randint(len(tokens) - LENGTH, (TEXTS,), generator=generator)
        pieces = tokens[starts[:, None] + torch.arange(LENGTH)]
        loss, found = torch.tensor(0.0), torch.zeros(GUESSES)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                outputs = net.model(pieces)
                said = functional.linear(outputs, embedding).float().log_softmax(-1)
            x = outputs
            for number in range(GUESSES):
                x = head(functional.embedding(pieces[:, number + 1 :], embedding).detach(), x[:, : LENGTH - number - 1])
                guessed = functional.linear(x, embedding.detach()).float().log_softmax(-1)
                expected = said[:, number + 1 :]
                loss = loss + functional.kl_div(guessed, expected, log_target=True, reduction="batchmean") / LENGTH
                found[number] = (guessed.argmax(-1) == expected.argmax(-1)).float().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        right = found if not step else 0.95 * right + 0.05 * found
        if step % 25 == 24:
            shares = ", ".join(f"{share:.2f}" for share in right.tolist())
            print(f"step {step + 1}, loss {loss.item():.3f}, right {shares}", flush=True)


def main() -> None:
    """Writes the head's weights."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    texts = [written(conversation) for conversation in conversations(Random(0))]
    encoded = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode_batch(["".join(texts)])[0].ids
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(CONFIG))
        save_file(
            load_file(MODEL / "model.safetensors") | {"mtp.fc.weight": torch.zeros(1)},
            Path(place) / "model.safetensors",
        )
        config = HfCheckpoint(Path(place)).config
    net, head = Net(config), PredictorNet(config)
    net.load_state_dict({name: tensor.float() for name, tensor in load_file(MODEL / "model.safetensors").items()})
    trained(net, head, torch.tensor(encoded))
    save_file(
        {f"mtp.{name}": value.detach().to(torch.bfloat16).contiguous() for name, value in head.state_dict().items()},
        HEAD,
    )


if __name__ == "__main__":
    main()
