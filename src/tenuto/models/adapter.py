"""Adapters (LoRA, Hu et al., arXiv:2106.09685) in the directories that PEFT writes: `adapter_config.json` and
`adapter_model.safetensors`."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Kind

from tenuto.base.errors import ModelError
from tenuto.formats.safetensors_file import SafeTensor, read_safetensors
from tenuto.models.config import UNGATED, Attention, Mlp, ModelConfig
from tenuto.models.settings import Settings, read_json
from tenuto.models.weights import FLOATS, Floats, StoredWeight, wrong_shape

MAX_RANK = 512
_LARGEST = float(np.finfo(np.float32).max)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_FUSED = ("qkv_proj", "gate_up_proj")
"""Projections that some families store as one matrix, which computes several of `TARGETS`."""
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_UNSET: tuple[object, ...] = (False, [], {}, None)
_ONLY: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": (None, "none"),
    "init_lora_weights": (None, False, "gaussian", "eva", "orthogonal", True),  # others change the model's own weights
    **dict.fromkeys(
        (
            "use_dora",
            "lora_bias",
            "fan_in_fan_out",
            "use_qalora",
            "modules_to_save",
            "layer_replication",
            "trainable_token_indices",
            "target_parameters",
            "alora_invocation_tokens",
            "rank_pattern",
            "alpha_pattern",
        ),
        _UNSET,
    ),
}

Translation = Callable[[Iterable[tuple[str, StoredWeight]]], Iterator[tuple[str, StoredWeight]]]
"""See `ModelCheckpoint.translation`."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """A change of one projection: its outputs for an input `x` grow by `scale * up @ (down @ x)`. `down`: float32
    [rank, inputs]. `up`: float32 [outputs, rank]."""

    down: Floats
    up: Floats
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """The changes of a model's projections, by the names of their weights without `.weight`. `digest`: a SHA-256, in
    hexadecimal, of all that an adapter computes with. Adapters with equal digests compute the same."""

    changes: Mapping[str, LowRank]
    digest: str


def read_adapter(directory: Path, config: ModelConfig, translate: Translation) -> Adapter:
    """Reads an adapter for the model of `config`. `translate`: see `ModelCheckpoint.translation`. Raises `ModelError`
    if files are missing or damaged, if the adapter has parts that are not supported, or if it does not fit the
    model."""
    settings = Settings(read_json(directory / _CONFIG), directory / _CONFIG)
    settings.only(_ONLY)
    _check_targets(settings)
    rank = settings.get("r", int)
    if not 1 <= rank <= MAX_RANK:
        raise ModelError(f"{settings.source} has r = {rank}; allowed: 1 to {MAX_RANK}")
    alpha = settings.get("lora_alpha", float, 8.0)
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora", bool, default=False) else rank)
    if not abs(scale) <= _LARGEST:  # NaN included
        raise ModelError(f"{settings.source} has lora_alpha = {alpha}; allowed: finite numbers, also in 32 bits")
    expected = projections(config)
    changes: dict[str, LowRank] = {}
    for module, (down, up) in _pairs(directory / _WEIGHTS, rank).items():
        for name, part in translate([(f"{module}.weight", up)]):
            ours = name.removesuffix(".weight")
            if ours not in expected:
                raise ModelError(f"the adapter changes {module!r}; allowed: {_allowed(expected)}")
            outputs, inputs = expected[ours]
            for stored, shape in ((down, (rank, inputs)), (part, (outputs, rank))):
                if stored.shape != shape:
                    raise wrong_shape(f"{module} of the adapter", stored.shape, shape)
            changes[ours] = LowRank(down.decode(), part.decode(), scale)
    if not changes:
        raise ModelError(f"{directory / _WEIGHTS} changes nothing; allowed: {_allowed(expected)}")
    return Adapter(changes, _digest(changes))


def _check_targets(settings: Settings) -> None:
    """Raises `ModelError` if a listed target is not supported. A pattern stands for whatever is in the weights."""
    targets = settings.optional("target_modules", object)
    for target in targets if isinstance(targets, list) else ():
        if not isinstance(target, str) or target.rpartition(".")[2] not in (*TARGETS, *_FUSED):
            raise ModelError(
                f"{settings.source} has {target!r} in target_modules; allowed: {', '.join((*TARGETS, *_FUSED))}"
            )


def _pairs(path: Path, rank: int) -> dict[str, tuple[StoredWeight, StoredWeight]]:
    """Returns the two matrices of each changed module: [`rank`, inputs] and [outputs, `rank`]."""
    found: dict[str, dict[str, StoredWeight]] = {}
    for name, tensor in read_safetensors(path).items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise ModelError(f"{path} has a tensor {name!r}; allowed: lora_A.weight and lora_B.weight of modules")
        module, part = match.groups()
        found.setdefault(module, {})[part] = _stored(path, name, tensor)
    pairs = {}
    for module, parts in found.items():
        if len(parts) < 2:
            raise ModelError(f"{path} has only one of lora_A and lora_B for {module!r}")
        down, up = parts["A"], parts["B"]
        if down.shape[:1] != (rank,) or up.shape[1:] != (rank,) or len(down.shape) != 2:
            raise ModelError(
                f"{path} has matrices of shapes {list(down.shape)} and {list(up.shape)} for {module!r}; expected: "
                f"[{rank}, inputs] and [outputs, {rank}]"
            )
        pairs[module] = down, up
    return pairs


def _stored(path: Path, name: str, tensor: SafeTensor) -> StoredWeight:
    if tensor.dtype not in FLOATS or 0 in tensor.shape:
        raise ModelError(
            f"{path} has the tensor {name!r} of type {tensor.dtype} and shape {list(tensor.shape)}; supported: "
            f"{', '.join(FLOATS)}, sizes of at least 1"
        )
    values = StoredWeight.mapped(FLOATS[tensor.dtype], tensor.shape, tensor.span).decode()
    if not np.isfinite(values).all():
        raise ModelError(f"{path} has the tensor {name!r} with infinite values or NaN; allowed: finite ones")
    return StoredWeight.of(values, Kind.F32)


def projections(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Returns the names of all projections that adapters may change, with their numbers of outputs and inputs."""
    found, hidden = dict[str, tuple[int, int]](), config.hidden
    for number, layer in enumerate(config.layers):
        name = f"model.layers.{number}."
        for mixer in layer.mixers:
            if isinstance(mixer, Attention):
                width, kv = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
                outputs = {"q": width * (2 if mixer.gated else 1), "k": kv, "v": kv}
                found |= {f"{name}self_attn.{part}_proj": (size, hidden) for part, size in outputs.items()}
                found[f"{name}self_attn.o_proj"] = hidden, width
        if isinstance(layer.feed_forward, Mlp):
            width, ungated = layer.feed_forward.width, layer.feed_forward.activation in UNGATED
            found |= {f"{name}mlp.{part}_proj": (width, hidden) for part in ("gate", "up")[ungated:]}
            found[f"{name}mlp.down_proj"] = hidden, width
    return found


def _allowed(expected: Mapping[str, object]) -> str:
    """Names the projections of this model that adapters may change, for an error."""
    parts = {name.rpartition(".")[2] for name in expected}
    return ", ".join(target for target in TARGETS if target in parts) + " of attention and of dense feed-forward layers"


def _digest(changes: Mapping[str, LowRank]) -> str:
    whole = hashlib.sha256()
    for name, change in sorted(changes.items()):
        whole.update(f"{name} {change.down.shape} {change.up.shape} {change.scale}\n".encode())
        whole.update(np.ascontiguousarray(change.down).data)
        whole.update(np.ascontiguousarray(change.up).data)
    return whole.hexdigest()
