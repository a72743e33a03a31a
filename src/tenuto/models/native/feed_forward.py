"""Makes the operations of feed-forward networks and of mixtures of experts."""

from __future__ import annotations

from tenuto.kernels.native import library
from tenuto.kernels.native.library import Op, OpKind
from tenuto.kernels.native.pack import LANES
from tenuto.models.config import ACTIVATIONS, UNGATED, Experts, Mlp
from tenuto.models.native.building import Building, op
from tenuto.models.native.panels import same_input

_PARTS = ("gate_proj", "up_proj")


def feed_forward(b: Building, shape: Mlp | Experts, name: str, *, apart: bool) -> list[Op]:
    """Returns the operations of a layer; the first is a norm. The names of its weights begin with `name`."""
    match shape:
        case Mlp():
            return _mlp(b, shape, name, apart=apart)
        case Experts():
            return _experts(b, shape, name, apart=apart)


def _mlp(b: Building, mlp: Mlp, name: str, *, apart: bool) -> list[Op]:
    part = f"{name}mlp."
    names = _inner_names(mlp.activation)
    (down,) = b.panels.matrices({f"{part}down_proj": b.config.hidden}, mlp.width, any_order=True)
    outputs, order = {part + each: mlp.width for each in names}, b.panels.input_order(down)
    inner = b.panels.matrices(
        outputs, b.config.hidden, order=dict.fromkeys(outputs, order) if order is not None else {}, any_order=True
    )
    return [
        b.norm(OpKind.NORM, f"{name}post_attention_layernorm", inner[0]),
        op(
            OpKind.GATED,
            consumer=down.format,
            activation=_activation(mlp.activation),
            gate_scale=mlp.gate_scale,
            **dict(zip(("first", "second"), inner, strict=False)),
        ),
        b.add(down, apart=apart, scale=mlp.out_scale),
    ]


def _experts(b: Building, e: Experts, name: str, *, apart: bool) -> list[Op]:
    """Returns the operations of a mixture of experts. The router's scores and the gate of the shared expert are
    projected. Then the shared expert computes all tokens, and the other experts the tokens routed to them. The input is
    normalised again if router and experts are stored in different types, as in GGUF files, whose routers are float32:
    with a single input, the experts would have to become float32, too."""
    part, hidden, activation = f"{name}mlp.", b.config.hidden, _activation(e.activation)
    names = _inner_names(e.activation)
    b.panels.require(f"{part}gate.weight", e.count, hidden)  # before memory is allocated per expert
    own, shared = [f"{part}experts.{i}." for i in range(e.count)], f"{part}shared_expert."
    scored = {f"{part}gate": e.count}
    gate = {f"{part}shared_expert_gate": 1} if e.shared and e.shared_gate else {}
    chosen_from = {expert + each: e.width for each in names for expert in own}
    for_all = {shared + each: e.shared for each in names if e.shared}
    if e.biased:
        (scores,), gates_of_shared = b.panels.matrices(scored, hidden, bias=True), b.panels.matrices(gate, hidden)
        inner, beside = (b.panels.matrices(chosen_from, hidden, bias=True), b.panels.matrices(for_all, hidden))
    else:
        scores, *gates_of_shared = b.panels.matrices(scored | gate, hidden)
        both = b.panels.matrices(chosen_from | for_all, hidden)
        inner, beside = both[: len(chosen_from)], both[len(chosen_from) :]
    down = b.panels.matrices({f"{expert}down_proj": hidden for expert in own}, e.width, bias=e.biased)
    gates, *ups = (b.listed(inner[i : i + e.count]) for i in range(0, len(inner), e.count))
    correction = b.panels.vector(f"{part}gate.correction", e.count) if e.sigmoid else None
    experts = b.pointed(
        library.Experts(
            e.count, e.chosen, e.normalised, e.scale, correction, gates, ups[0] if ups else None, b.listed(down)
        )
    )
    projections = dict(zip(("first", "second"), [scores, *gates_of_shared], strict=False))
    norm = f"{name}post_attention_layernorm"
    ops = [b.norm(OpKind.NORM, norm, scores), op(OpKind.PROJECT, **projections)]
    if not same_input(scores, inner[0]):
        ops.append(b.norm(OpKind.NORM, norm, inner[0]))
    if e.shared:
        (out,) = b.panels.matrices({f"{shared}down_proj": hidden}, e.shared)
        column = scores.panels * LANES if e.shared_gate else -1
        inside = dict(zip(("first", "second"), beside, strict=False))
        ops += [
            op(OpKind.GATED, consumer=out.format, activation=activation, **inside),
            b.add(out, apart=apart, column=column),
        ]
    scale = 1.0 if apart else b.config.residual_scale
    return [*ops, op(OpKind.EXPERTS, activation=activation, experts=experts, apart=apart, scale=scale)]


def _inner_names(activation: str) -> tuple[str, ...]:
    """Returns the names of the network's input projections."""
    return _PARTS[1:] if activation in UNGATED else _PARTS


def _activation(name: str) -> int:
    """Returns the number of an activation, in the enumeration `Activation` of `interface.h`."""
    return ACTIVATIONS.index(name)
