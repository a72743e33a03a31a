"""A model with hand-made weights: it calls a tool if it is given any, and answers once it has a result.

Its only layer adds nothing, so the last token alone determines the next one. The chat template ends with one of two
tokens, one for a call and one for an answer. So clients' tool loops run on a deterministic model, with prompts of any
length.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel as ByteLevelSplit

ANSWER = "All of it is done."
HEAD = 16
VOCABULARY = 272
"""A multiple of 16, for the native kernels; also the hidden size, so that every token has its own direction."""
CONTEXT = 2**18
CONTROLS = ("<|im_start|>", "<|im_end|>", "<|call|>", "<|answer|>", "<|think_call|>", "<|think_answer|>")
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "<|THOUGHTS|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if tools and not messages | selectattr('role', 'equalto', 'tool') | list %}<|CALL|>"
    "{% else %}<|ANSWER|>{% endif %}{% endif %}"
)
OPEN_THOUGHT, CLOSE_THOUGHT = "<think>\n", "\n</think>\n\n"
THOUGHT_OF_CALL = f"{OPEN_THOUGHT}A function knows it.{CLOSE_THOUGHT}"
THOUGHTS = f"{{% if m.reasoning_content %}}{OPEN_THOUGHT}{{{{ m.reasoning_content }}}}{CLOSE_THOUGHT}{{% endif %}}"
THINKS = "{% set think = '' if enable_thinking is defined and not enable_thinking else 'think_' %}"


def write_caller(
    directory: Path,
    function: str,
    arguments: dict[str, Any],
    answer: str = ANSWER,
    thoughts: Sequence[str] = (),
    *,
    calls: Sequence[tuple[str, dict[str, Any]]] = (),
    goes_on: str = "",
) -> Path:
    """Writes a model that calls `function`, or answers, to `directory`, and returns the directory. `thoughts`: tokens
    before an answer, all different; then it also thinks before a call, unless `enable_thinking` is false. `calls`:
    further functions that it calls at once, with their arguments. `goes_on`: what it writes after any text that is
    not a chat, again and again unless it is also `answer`; by default it ends at once."""
    directory.mkdir(parents=True, exist_ok=True)
    made = [{"name": name, "arguments": given} for name, given in ((function, arguments), *calls)]
    call = json.dumps(made if calls else made[0], ensure_ascii=False)
    thought = [OPEN_THOUGHT, *thoughts, CLOSE_THOUGHT] if thoughts else []
    texts = [call, *thought, answer, *([THOUGHT_OF_CALL] if thoughts else []), *([goes_on] if goes_on else [])]
    ids = _write_tokenizer(directory, list(dict.fromkeys(texts)), _template(thinks=bool(thoughts)))
    end = "<|im_end|>"
    follows = np.full(VOCABULARY, ids[goes_on or end])
    chains = [["<|call|>", call, end], ["<|answer|>", answer, end]]
    if thoughts:
        chains += [["<|think_call|>", THOUGHT_OF_CALL, call], ["<|think_answer|>", *thought, answer]]
    for earlier, later in chain.from_iterable(map(pairwise, chains)):
        follows[ids[earlier]] = ids[later]
    _write_weights(directory / "model.safetensors", follows)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": VOCABULARY,
        "intermediate_size": HEAD,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": ids["<|im_end|>"],
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _template(*, thinks: bool) -> str:
    """Returns the chat template. Its last token chooses between a call and an answer, each with or without thoughts."""
    chosen = TEMPLATE
    for name in ("call", "answer"):
        token = f"{{{{ '<|' + think + '{name}|>' }}}}" if thinks else f"<|{name}|>"
        chosen = chosen.replace(f"<|{name.upper()}|>", token)
    return (THINKS if thinks else "") + chosen.replace("<|THOUGHTS|>", THOUGHTS if thinks else "")


def _write_tokenizer(directory: Path, texts: list[str], template: str) -> dict[str, int]:
    """Writes a tokenizer whose tokens are the bytes and the given texts, which no input encodes to. Returns the ids of
    these texts and of the control tokens."""
    letters = sorted(ByteLevelSplit.alphabet())
    split = ByteLevelSplit(add_prefix_space=False, use_regex=False)
    words = [split.pre_tokenize_str(text)[0][0] for text in texts]
    words += [f"\u0120unused{number}" for number in range(VOCABULARY - len(letters) - len(words) - len(CONTROLS))]
    backend = tokenizers.Tokenizer(BPE({text: number for number, text in enumerate([*letters, *words])}, []))
    backend.pre_tokenizer = split
    backend.decoder = ByteLevel()
    backend.add_special_tokens(list(CONTROLS))
    backend.save(str(directory / "tokenizer.json"))
    told = {"eos_token": "<|im_end|>", "chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(told))
    ids, ids_of = {text: len(letters) + number for number, text in enumerate(texts)}, backend.get_vocab()
    return ids | {text: ids_of[text] for text in CONTROLS}


def _write_weights(path: Path, follows: np.ndarray[Any, Any]) -> None:
    """Writes weights with which token `follows[i]` comes after token i."""
    head = np.zeros((VOCABULARY, VOCABULARY), np.float32)
    head[follows, np.arange(VOCABULARY)] = 2.0
    layer = "model.layers.0"
    shapes = {
        f"{layer}.self_attn.q_proj.weight": (HEAD, VOCABULARY),
        f"{layer}.self_attn.k_proj.weight": (HEAD, VOCABULARY),
        f"{layer}.self_attn.v_proj.weight": (HEAD, VOCABULARY),
        f"{layer}.self_attn.o_proj.weight": (VOCABULARY, HEAD),
        f"{layer}.mlp.gate_proj.weight": (HEAD, VOCABULARY),
        f"{layer}.mlp.up_proj.weight": (HEAD, VOCABULARY),
        f"{layer}.mlp.down_proj.weight": (VOCABULARY, HEAD),
    }
    norms = ("model.norm", f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
    tensors: dict[str, np.ndarray[Any, Any]] = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": np.ones(VOCABULARY, np.float32) for name in norms}
    tensors |= {"model.embed_tokens.weight": np.eye(VOCABULARY, dtype=np.float32), "lm_head.weight": head}
    save_file(tensors, path, metadata={"format": "pt"})
