"""Nemotron-H (arXiv:2504.03624) and Nemotron 3. Every layer is one block: Mamba-2, attention, an ungated feed-forward
network, or experts."""

from __future__ import annotations

from collections.abc import Iterator

from tenuto.base.errors import ModelError
from tenuto.models.config import Experts, Layer, Mamba2, Mlp, ModelConfig
from tenuto.models.families.family import Family, Named, attention, each, replaced, split_layer
from tenuto.models.settings import Settings
from tenuto.models.weights import StoredWeight

_KINDS = ("linear_attention", "full_attention", "mlp", "moe")
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_TOP = {"model.embeddings.": "model.embed_tokens.", "model.norm_f.": "model.norm."}
_OF_EXPERTS = {
    "mixer.gate.e_score_correction_bias": "mlp.gate.correction",
    "mixer.shared_experts.": "mlp.shared_expert.",
}


def _read(settings: Settings, eos: tuple[int, ...]) -> ModelConfig:
    settings.only(
        {
            "mlp_hidden_act": (None, "relu2"),
            "mamba_hidden_act": (None, "silu"),
            "mlp_bias": (None, False),
            "sliding_window": (None,),
            "moe_latent_size": (None,),
            "n_group": (None, 1),
        }
    )
    mlp = Mlp(settings.get("intermediate_size", int), "relu2")
    kinds = _kinds(settings)
    made = {
        "linear_attention": Layer(_mamba2(settings), None),
        "full_attention": Layer(attention(settings, rope=None), None),
        "mlp": Layer(None, mlp),
    }
    if "moe" in kinds:
        made["moe"] = Layer(None, _experts(settings))
    epsilon = settings.get("layer_norm_epsilon", float, 1e-5)
    return ModelConfig(tuple(made[kind] for kind in kinds), **settings.facts(eos, norm_eps=epsilon))


def _kinds(settings: Settings) -> list[str]:
    """Returns the kind of each layer; older files write one character per layer instead of a list."""
    letters = settings.optional("hybrid_override_pattern", str)
    if letters is None:
        value = settings.get("layers_block_type", list)
        found = [_OLDER.get(one, one) if isinstance(one, str) else one for one in value]
    else:
        found = [_LETTERS.get(letter, letter) for letter in letters]
    if any(one not in _KINDS for one in found):
        raise ModelError(f"{settings.source} has layers {found!r}; supported: {', '.join(_KINDS)}")
    return found


def _mamba2(settings: Settings) -> Mamba2:
    return Mamba2(
        settings.get("mamba_num_heads", int),
        settings.get("mamba_head_dim", int),
        state=settings.get("ssm_state_size", int),
        groups=settings.get("n_groups", int),
        kernel=settings.get("conv_kernel", int),
        conv_bias=settings.get("use_conv_bias", bool, default=True),
        proj_bias=settings.get("use_bias", bool, default=False),
        least_step=settings.get("time_step_min", float, 0.001),
    )


def _experts(settings: Settings) -> Experts:
    shared = settings.get("moe_shared_expert_intermediate_size", int)
    return Experts(
        settings.get("n_routed_experts", int),
        settings.get("num_experts_per_tok", int),
        settings.get("moe_intermediate_size", int),
        normalised=settings.get("norm_topk_prob", bool, default=True),
        shared=shared,
        activation="relu2",
        sigmoid=True,
        scale=settings.get("routed_scaling_factor", float, 1.0),
    )


def _translate(config: ModelConfig, name: str, weight: StoredWeight) -> Iterator[Named]:
    """Renames a weight; omits the layers for multi-token prediction."""
    name = replaced(name, {"backbone.": "model."})
    if name.startswith("mtp."):
        return
    head, part = split_layer(name)
    if not head:
        yield replaced(name, _TOP), weight
        return
    number = int(head.split(".")[2])
    yield head + (replaced(part, _names(config.layers[number])) if number < len(config.layers) else part), weight


def _names(layer: Layer) -> dict[str, str]:
    """Returns our prefixes for the weights of a layer: those of its norm, and of its only block."""
    if layer.mixer is not None:
        block = "mamba." if isinstance(layer.mixer, Mamba2) else "self_attn."
        return {"norm.": "input_layernorm.", "mixer.": block}
    of_experts = _OF_EXPERTS if isinstance(layer.feed_forward, Experts) else {}
    return {"norm.": "post_attention_layernorm.", **of_experts, "mixer.": "mlp."}


FAMILY = Family("Nemotron-H", ("NemotronHForCausalLM",), _read, each(_translate))
