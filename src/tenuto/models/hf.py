"""Models in Hugging Face directories: `config.json` and safetensors files, sharded or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tenuto.base.errors import ModelError
from tenuto.formats.safetensors_file import SafeTensor, read_safetensors
from tenuto.models.families import (
    bamba,
    falcon_h1,
    gemma2,
    gemma3,
    gpt_oss,
    granite,
    granite3,
    llama,
    nemotron_h,
    phi3,
    qwen,
    qwen3_next,
    smollm3,
    tenuto,
)
from tenuto.models.families.family import Family
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
    qwen3_next.FAMILY,
    gpt_oss.FAMILY,
    tenuto.FAMILY,
)
SUPPORTED = ", ".join(family.name for family in FAMILIES)
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class HfCheckpoint:
    """A model in a directory as `save_pretrained` of transformers writes it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        settings = Settings(read_json(directory / "config.json"), directory / "config.json")
        self._family = _family(settings)
        _check_quantization(settings, self._family)
        self.config = self._family.read(settings, _eos(directory, settings))

    def weights(self) -> Iterator[tuple[str, StoredWeight]]:
        """See `Checkpoint.weights`."""
        return self._family.translate(self.config, self._tensors())

    def _tensors(self) -> Iterator[tuple[str, StoredWeight]]:
        """Everything that is stored, under the names it is stored by."""
        for file in self._files():
            for name, tensor in read_safetensors(file).items():
                if not self._derived(name):
                    yield name, _stored(name, tensor, self._family)

    def _files(self) -> list[Path]:
        index = self._directory / _INDEX
        if not index.exists():
            return [self._directory / _SINGLE]
        names = list(Settings(read_json(index), index).get("weight_map", dict).values())
        if wrong := [name for name in names if not isinstance(name, str) or name != Path(name).name]:
            raise ModelError(f"{index} has weights in {wrong[0]!r}; expected: the name of a file beside it")
        return [self._directory / name for name in sorted(set(names))]

    def _derived(self, name: str) -> bool:
        """Whether a tensor repeats what the configuration says: old files store frequencies, some a tied head."""
        return name.endswith("rotary_emb.inv_freq") or (self.config.tied and name == "lm_head.weight")


def _stored(name: str, tensor: SafeTensor, family: Family) -> StoredWeight:
    known = FLOATS | ({"U8": BYTES} if family.quantized else {})
    if tensor.dtype not in known:
        raise ModelError(
            f"tensor {name!r} of {tensor.span.path} is of type {tensor.dtype}; supported: {', '.join(known)}"
        )
    return StoredWeight.mapped(known[tensor.dtype], tensor.shape, tensor.span)


def _family(settings: Settings) -> Family:
    """Who knows the architecture. Raises `ModelError` if nobody does."""
    architectures = settings.get("architectures", list, [])
    for family in FAMILIES:
        if any(name in family.architectures for name in architectures):
            return family
    raise ModelError(f"{settings.source} names architectures {architectures}; supported: {SUPPORTED}")


def _check_quantization(settings: Settings, family: Family) -> None:
    quantization = settings.part("quantization_config")
    if quantization is not None and quantization.optional("quant_method", str) not in family.quantized:
        supported = ", ".join(("none", *family.quantized))
        raise ModelError(f"{settings.source} has a quantization_config that is not supported; supported: {supported}")


def _eos(directory: Path, settings: Settings) -> tuple[int, ...]:
    """Every token that ends a turn: `generation_config.json` often lists more than `config.json`."""
    found, generation = settings.ids("eos_token_id"), directory / "generation_config.json"
    if generation.exists():
        found |= Settings(read_json(generation), generation).ids("eos_token_id")
    return tuple(sorted(found))
