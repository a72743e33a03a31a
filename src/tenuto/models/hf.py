"""Llama models in Hugging Face directories: `config.json` and safetensors files, sharded or not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from tenuto.base.errors import ModelError
from tenuto.models.config import SUPPORTED, ModelConfig, linear_divisors, llama3_divisors
from tenuto.models.weights import FLOATS, StoredWeight, raw

_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_T = TypeVar("_T")


class HfCheckpoint:
    """A Llama model in a directory as `save_pretrained` of transformers writes it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.config = _config(directory)

    def weights(self) -> Iterator[tuple[str, StoredWeight]]:
        """See `Checkpoint.weights`."""
        for file in self._files():
            with _opened(file) as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping: it cannot be iterated itself
                    if not self._derived(name):
                        yield name, _stored(file, name, opened.get_slice(name))

    def _files(self) -> list[Path]:
        index = self._directory / _INDEX
        if not index.exists():
            return [self._directory / _SINGLE]
        names = _get(_read_json(index), "weight_map", dict, index)
        return [self._directory / name for name in sorted(set(names.values()))]

    def _derived(self, name: str) -> bool:
        """Whether a tensor repeats what the configuration says: old files store frequencies, some a tied head."""
        return name.endswith("rotary_emb.inv_freq") or (self.config.tied and name == "lm_head.weight")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} is missing or damaged ({error}); fetch the model again") from error


def _stored(file: Path, name: str, described: Any) -> StoredWeight:
    def read() -> torch.Tensor:
        with _opened(file) as opened:
            return raw(opened.get_tensor(name))

    kind = described.get_dtype()
    if kind not in FLOATS:
        raise ModelError(f"tensor {name!r} of {file} is of type {kind}; supported: {', '.join(FLOATS)}")
    return StoredWeight(FLOATS[kind], tuple(described.get_shape()), read)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is missing or damaged ({error}); fetch the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object; fetch the model again")
    return value


def _get(values: Mapping[str, Any], key: str, kind: type[_T], source: Path) -> _T:
    """`values[key]`, which must be there and of type `kind`; an int may stand for a float."""
    value = values.get(key)
    if kind is float and type(value) is int:
        value = float(value)
    if not isinstance(value, kind):
        raise ModelError(f"{source} has {key} = {value!r}; expected: {kind.__name__}")
    return value


def _config(directory: Path) -> ModelConfig:
    source = directory / "config.json"
    raw = _read_json(source)
    _refuse_unsupported(raw, source)
    hidden, heads = _get(raw, "hidden_size", int, source), _get(raw, "num_attention_heads", int, source)
    head_dim = raw.get("head_dim") or hidden // heads
    theta, divisors = _rope(raw, head_dim, source)
    return ModelConfig(
        layers=_get(raw, "num_hidden_layers", int, source),
        hidden=hidden,
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        ffn=_get(raw, "intermediate_size", int, source),
        vocab=_get(raw, "vocab_size", int, source),
        rope_theta=theta,
        rope_divisors=divisors,
        norm_eps=_get(raw, "rms_norm_eps", float, source),
        tied=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        max_context=_get(raw, "max_position_embeddings", int, source),
        eos=_eos(directory, raw),
        bos=raw.get("bos_token_id"),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
    )


def _refuse_unsupported(raw: Mapping[str, Any], source: Path) -> None:
    """Raise `ModelError` for anything that would need other arithmetic than `Llama` has."""
    architectures = raw.get("architectures") or []
    if not any(name in _ARCHITECTURES for name in architectures):
        raise ModelError(f"{source} names architectures {architectures}; supported: {SUPPORTED}")
    only: dict[str, tuple[object, ...]] = {
        "hidden_act": ("silu",),
        "mlp_bias": (None, False),
        "sliding_window": (None,),
        "partial_rotary_factor": (None, 1.0),
        "quantization_config": (None,),
    }
    for key, allowed in only.items():
        if raw.get(key) not in allowed:
            raise ModelError(f"{source} has {key} = {raw.get(key)!r}; supported: {allowed[-1]!r}")


def _rope(raw: Mapping[str, Any], head_dim: int, source: Path) -> tuple[float, tuple[float, ...]]:
    """Theta and divisors, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    before = {"rope_theta": raw.get("rope_theta", 10000.0), **(raw.get("rope_scaling") or {})}
    values = raw.get("rope_parameters") or before
    theta = _get(values, "rope_theta", float, source)
    match values.get("rope_type") or values.get("type") or "default":
        case "default":
            return theta, linear_divisors(head_dim, 1.0)
        case "linear":
            return theta, linear_divisors(head_dim, _get(values, "factor", float, source))
        case "llama3":
            return theta, llama3_divisors(
                head_dim,
                theta,
                factor=_get(values, "factor", float, source),
                low_factor=_get(values, "low_freq_factor", float, source),
                high_factor=_get(values, "high_freq_factor", float, source),
                original_context=_get(values, "original_max_position_embeddings", int, source),
            )
        case other:
            raise ModelError(f"{source} has rope scaling {other!r}; supported: default, linear, llama3")


def _eos(directory: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Every token that ends a turn: `generation_config.json` often lists more than `config.json`."""
    generation = directory / "generation_config.json"
    found: set[int] = set()
    for values in (raw, _read_json(generation) if generation.exists() else {}):
        ids = values.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return tuple(sorted(found))
