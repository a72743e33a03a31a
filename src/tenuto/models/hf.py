"""Models in Hugging Face directories: `config.json` with one or several safetensors files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from tenuto.base.errors import ModelError
from tenuto.formats.safetensors_file import SafeTensor, read_safetensors
from tenuto.models.adapter import Translation
from tenuto.models.config import PREDICTOR
from tenuto.models.families import (
    bamba,
    falcon_h1,
    gemma2,
    gemma3,
    gpt_oss,
    granite,
    granite3,
    llama,
    mamba,
    nemotron_h,
    phi3,
    qwen,
    qwen3_next,
    smollm3,
    tenuto,
)
from tenuto.models.families.family import Family
from tenuto.models.quantized import METHODS, Method
from tenuto.models.settings import Settings, read_json
from tenuto.models.weights import BYTES, FLOATS, StoredWeight

FAMILIES = (
    llama.FAMILY,
    llama.MISTRAL,
    *qwen.FAMILIES,
    smollm3.FAMILY,
    phi3.FAMILY,
    *granite3.FAMILIES,
    gemma2.FAMILY,
    gemma3.FAMILY,
    bamba.FAMILY,
    granite.FAMILY,
    falcon_h1.FAMILY,
    nemotron_h.FAMILY,
    *mamba.FAMILIES,
    qwen3_next.FAMILY,
    gpt_oss.FAMILY,
    tenuto.FAMILY,
)
SUPPORTED = ", ".join(family.name for family in FAMILIES)
_PREFIX = "model."
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SINGLE = "model.safetensors"


class HfCheckpoint:
    """A `ModelCheckpoint` in a directory written by `save_pretrained` of transformers. `stored` has its tensors by
    their stored names."""

    INDEX = "model.safetensors.index.json"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        settings = Settings(read_json(directory / "config.json"), directory / "config.json")
        self._family = _family(settings)
        settings.only({"is_causal": (None, True), "use_bidirectional_attention": (None, False)})  # encoders
        self._method = _method(settings, self._family)
        stored = self._read()
        bare = _EMBEDDING.removeprefix(_PREFIX) in stored  # saved without the output matrix
        self.stored = {_PREFIX + name if bare and name != _HEAD else name: each for name, each in stored.items()}
        self._check_sizes(settings)
        self.config = self._family.read(settings, _eos(directory, settings))
        if self.config.predictor and not any(name.startswith(PREDICTOR) for name in self.stored):
            self.config = replace(self.config, predictor=())  # transformers, for example, saves models without it
        if self.config.tied and self._has_own_head():
            self.config = replace(self.config, tied=False)
        if bare and not self.config.tied and _HEAD not in self.stored:
            self.config = replace(self.config, tied=True, headless=True)

    def weights(self) -> Iterator[tuple[str, StoredWeight]]:
        """See `ModelCheckpoint.weights`."""
        return self._family.translate(self.config, self._tensors())

    def tensor(self, name: str) -> StoredWeight | None:
        """Returns a tensor by its stored name; a tied output matrix is the embedding."""
        stored = self.stored.get(name if not (self.config.tied and name == _HEAD) else _EMBEDDING)
        return _as_weight(name, stored, self._family) if stored is not None else None

    @property
    def translation(self) -> Translation:
        """See `ModelCheckpoint.translation`."""
        return partial(self._family.translate, self.config)

    def _tensors(self) -> Iterator[tuple[str, StoredWeight]]:
        """Yields the stored tensors under their stored names; omits redundant ones (`redundant`)."""
        stored = self._method.tensors(self.stored) if self._method is not None else self.stored.items()
        for name, tensor in stored:
            if not self.redundant(name):
                yield name, tensor if isinstance(tensor, StoredWeight) else _as_weight(name, tensor, self._family)

    def _check_sizes(self, settings: Settings) -> None:
        """Raises `ModelError` for impossible sizes: more layers than tensors, or empty tensors."""
        layers = settings.get("num_hidden_layers", int, 0)
        if layers > len(self.stored):
            raise ModelError(
                f"{settings.source} has num_hidden_layers {layers}, but there are {len(self.stored)} tensors"
            )
        for name, tensor in self.stored.items():
            if 0 in tensor.shape:
                raise ModelError(f"tensor {name!r} is of shape {list(tensor.shape)}; allowed: sizes of at least 1")

    def _has_own_head(self) -> bool:
        """Whether the files have an output matrix that differs from the embedding although `config.json` ties the two,
        for example because an adapter was merged. Like transformers, we compute with it."""
        if _HEAD not in self.stored:
            return False
        embedding = next((weight for name, weight in self.weights() if name == _EMBEDDING), None)
        head = _as_weight(_HEAD, self.stored[_HEAD], self._family)
        return embedding is not None and not embedding.equals(head)

    def _read(self) -> dict[str, SafeTensor]:
        """Returns all tensors; an index, if there is one, says which file has which tensor."""
        index = self._directory / self.INDEX
        if not index.exists():
            return read_safetensors(self._directory / _SINGLE)
        places = Settings(read_json(index), index).get("weight_map", dict)
        if wrong := [name for name in places.values() if not isinstance(name, str) or name != Path(name).name]:
            raise ModelError(f"{index} has weights in {wrong[0]!r}; expected: the name of a file beside it")
        files = {name: read_safetensors(self._directory / name) for name in sorted(set(places.values()))}
        return {
            name: tensor
            for file, tensors in files.items()
            for name, tensor in tensors.items()
            if places.get(name) == file
        }

    def redundant(self, name: str) -> bool:
        """Whether a tensor is redundant: old files store rope frequencies, some store a tied output matrix."""
        return name.endswith("rotary_emb.inv_freq") or (self.config.tied and name == _HEAD)


def _as_weight(name: str, tensor: SafeTensor, family: Family) -> StoredWeight:
    known = FLOATS | ({"U8": BYTES} if family.quantized else {})
    if tensor.dtype not in known:
        raise ModelError(
            f"tensor {name!r} of {tensor.span.path} is of type {tensor.dtype}; supported: {', '.join(known)}"
        )
    return StoredWeight.mapped(known[tensor.dtype], tensor.shape, tensor.span)


def _family(settings: Settings) -> Family:
    """Returns the family of the model's architecture. Raises `ModelError` if it is not supported."""
    architectures = settings.get("architectures", list, [])
    whole = [re.sub(r"Model$", "ForCausalLM", name) for name in architectures if isinstance(name, str)]
    for family in FAMILIES:
        if any(name in family.architectures for name in whole):
            return family
    raise ModelError(f"{settings.source} names architectures {architectures}; supported: {SUPPORTED}")


def _method(settings: Settings, family: Family) -> Method | None:
    """Returns the method by which the model's matrices are quantized; None if they are not, or if the model's family
    decodes them. Raises `ModelError` if it is not supported."""
    quantization = settings.part("quantization_config") or settings.part("compression_config")
    name = quantization.optional("quant_method", str) if quantization is not None else None
    if quantization is None or name in family.quantized:
        return None
    if name not in METHODS:
        supported = ", ".join(("none", *METHODS, *family.quantized))
        raise ModelError(
            f"{settings.source} has a quantization_config of method {name!r}, which is not supported; supported: "
            f"{supported}"
        )
    return METHODS[name](quantization)


def _eos(directory: Path, settings: Settings) -> tuple[int, ...]:
    """Returns the tokens that end a turn; `generation_config.json` often lists more than `config.json`."""
    found, generation = settings.ids("eos_token_id"), directory / "generation_config.json"
    if generation.exists():
        found |= Settings(read_json(generation), generation).ids("eos_token_id")
    return tuple(sorted(found))
