"""`python -m tests.hybrid.train [DIRECTORY]` trains the small hybrid again, in a quarter of an hour on one core.

The texts are Python's own documentation (PSF license), as installed; another version of Python gives other texts and so
another model. The one committed in `tests/hybrid/model` was made by CPython 3.11.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional

from tenuto.models.hf import HfCheckpoint
from tests.hybrid.corpus import Conversation, conversations
from tests.hybrid.net import Net

HERE = Path(__file__).parent / "model"
STEPS = 880
TEXTS, LENGTH = 8, 256
PEAK, WARMUP = 4e-3, 30
OPENS, CLOSES = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 2048
CONFIG = {
    "architectures": ["TenutoForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 6,
    "layer_types": ["mamba", "sliding_attention", "mamba", "full_attention", "mamba", "sliding_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 64,
    "rope_theta": 10000.0,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 16384,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}


def written(conversation: Conversation) -> str:
    """Writes a conversation as the template renders it."""
    turns = (
        f"{OPENS}user\n{asked}{CLOSES}\n{OPENS}assistant\n{answered}{CLOSES}\n" for asked, answered in conversation
    )
    return "".join(turns)


def made_tokenizer(texts: list[str]) -> Tokenizer:
    """Trains a byte-level BPE tokenizer; the control tokens come first."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in (OPENS, CLOSES)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def rate(step: int, steps: int) -> float:
    """Returns the learning rate: it rises for some steps and then falls linearly."""
    return PEAK * min((step + 1) / WARMUP, 1 - step / steps)


def trained(net: Net, tokens: torch.Tensor, steps: int) -> float:
    """Trains on random pieces of `tokens`, int64 [n]; returns the loss of the last steps, in nats a token."""
    matrices = [p for p in net.parameters() if p.dim() == 2]
    rest = [p for p in net.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.98))
    generator, loss = torch.Generator().manual_seed(0), 0.0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        starts = torch.randint(len(tokens) - LENGTH - 1, (TEXTS,), generator=generator)
        pieces = tokens[starts[:, None] + torch.arange(LENGTH + 1)]
        with torch.autocast("cpu", torch.bfloat16):
            logits = net(pieces[:, :-1])
        found = functional.cross_entropy(logits.float().flatten(0, 1), pieces[:, 1:].flatten())
        optimizer.zero_grad()
        found.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        loss = found.item() if not step else 0.98 * loss + 0.02 * found.item()
        if step % 25 == 24:
            print(f"{time.process_time():5.0f} s, step {step + 1}, loss {loss:.3f}", flush=True)
    return loss


def main(directory: Path = HERE, steps: int = STEPS) -> None:
    """Writes `config.json`, `tokenizer.json`, `tokenizer_config.json` and `model.safetensors`."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    texts = [written(conversation) for conversation in conversations(Random(0))]
    tokenizer = made_tokenizer(texts)
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": CLOSES, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    encoded = tokenizer.encode_batch(["".join(texts)])[0].ids
    net = Net(HfCheckpoint(directory).config)
    count = sum(parameter.numel() for parameter in net.parameters())
    print(f"{len(texts)} conversations, {len(encoded)} tokens, {count} parameters")
    print(f"loss {trained(net, torch.tensor(encoded), steps):.3f}")
    weights = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in net.state_dict().items()}
    save_file(weights, directory / "model.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
