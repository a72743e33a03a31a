"""Builds the operations of attention, Mamba-2 and gated delta nets. Each adds its output to the residual stream, or, if
`apart`, to a buffer that a later operation normalises and adds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tenuto.base.errors import InvariantError
from tenuto.kernels.native import library
from tenuto.kernels.native.library import Matrix, Op, OpKind
from tenuto.kernels.native.pack import LANES
from tenuto.models.config import Attention, GatedDelta, Mamba, Mamba2, Mixer
from tenuto.models.native.building import Building, op
from tenuto.models.weights import Floats


def mixer(b: Building, shape: Mixer, layer: int, name: str, *, apart: bool) -> list[Op]:
    """Returns the operations of mixer number `layer` of the model; the first is a norm. The names of its weights begin
    with `name`."""
    match shape:
        case Attention():
            return _attention(b, shape, layer, name, apart=apart)
        case Mamba():
            raise InvariantError("a layer of Mamba is an obstacle to the native kernels")
        case Mamba2():
            return _mamba2(b, shape, layer, name, apart=apart)
        case GatedDelta():
            return _gated_delta(b, shape, layer, name, apart=apart)


def _attention(b: Building, a: Attention, layer: int, name: str, *, apart: bool) -> list[Op]:
    part, hidden, width = f"{name}self_attn.", b.config.hidden, a.heads * a.head_dim
    outputs = {"q": width * (2 if a.gated else 1), "k": a.kv_heads * a.head_dim, "v": a.kv_heads * a.head_dim}
    scales = b.key_scales.get(layer)
    projections = {f"{part}{n}_proj": size for n, size in outputs.items()}
    q, k, v = b.panels.matrices(projections, hidden, bias=a.bias, any_order=True)
    (out,) = b.panels.matrices({f"{part}o_proj": hidden}, width, bias=a.out_bias, any_order=True)
    group, place = b.places[layer]
    norms = [b.panels.vector(f"{part}{n}_norm.weight", a.head_dim) if a.qk_norm else None for n in "qk"]
    sinks = b.panels.vector(f"{part}sinks", a.heads) if a.sinks else None
    shape = b.pointed(
        library.Attention(
            group,
            place,
            a.heads,
            b.rope(a.rope),
            a.gated,
            a.scale,
            a.cap,
            b.config.norm_eps,
            norms[0],
            norms[1],
            sinks,
            b.panels.floats(scales) if scales is not None else None,
        )
    )
    return [
        b.norm(OpKind.NORM, f"{name}input_layernorm", q),
        op(OpKind.QKV, first=q, second=k, third=v, attention=shape),
        op(OpKind.ATTEND, attention=shape, **b.read_by(out)),
        b.add(out, apart=apart, scale=a.out_scale),
    ]


def _mamba2(b: Building, m: Mamba2, layer: int, name: str, *, apart: bool) -> list[Op]:
    """Returns the operations of Mamba-2. The input projection computes gates, the convolution's inputs, and time
    steps."""
    part, hidden, panels = f"{name}mamba.", b.config.hidden, b.panels
    projected = {f"{part}in_proj": m.channels + m.convolved + m.heads}
    (first,) = panels.matrices(projected, hidden, bias=m.proj_bias, any_order=True)
    (out,) = panels.matrices({f"{part}out_proj": hidden}, m.channels, bias=m.proj_bias)
    group, place = b.places[layer]
    shape = library.Recurrent(
        group=group,
        layer=place,
        heads=m.heads,
        head_dim=m.head_dim,
        groups=m.groups,
        state_size=m.state,
        kernel=m.kernel,
        conv_column=m.channels,
        gate_column=0,
        step_column=m.channels + m.convolved,
        norm_groups=m.groups,
        gate_first=m.gate_first,
        gate_scale=m.gate_scale,
        step_scale=m.step_scale,
        min_step=m.least_step,
        max_step=m.most_step,
        epsilon=b.config.norm_eps,
        weights=_convolution(b, part, m.convolved, m.kernel, _scales(m)),
        bias=panels.vector(f"{part}conv1d.bias", m.convolved) if m.conv_bias else None,
        rates=panels.floats(_rates(panels.tensor(f"{part}A_log", m.heads))),
        step_bias=panels.vector(f"{part}dt_bias", m.heads),
        skip=panels.vector(f"{part}D", m.heads),
        norm=panels.vector(f"{part}norm.weight", m.channels) if m.normed else None,
    )
    add_output = b.add(out, apart=apart, scale=m.out_scale)
    return _recurrent(b, OpKind.SCAN, shape, [first], out, name, add_output)


def _gated_delta(b: Building, d: GatedDelta, layer: int, name: str, *, apart: bool) -> list[Op]:
    """Returns the operations of a gated delta net. Files order the outputs of two projections by key head. One has
    each head's query, key, and the values and output gates of its value heads, the other their write strengths and
    decays. Here they are reordered: the queries of all heads, then all keys, and so on."""
    part, hidden, panels = f"{name}linear_attn.", b.config.hidden, b.panels
    served, values = d.value_heads // d.key_heads, d.value_heads * d.value_dim
    sizes = {
        f"{part}in_proj_qkvz": [d.key_dim, d.key_dim, served * d.value_dim, served * d.value_dim],
        f"{part}in_proj_ba": [served, served],
    }
    for key, parts in sizes.items():  # checked before memory proportional to the outputs is allocated
        panels.require(f"{key}.weight", d.key_heads * sum(parts), hidden)
    first, second = panels.matrices(
        {key: d.key_heads * sum(parts) for key, parts in sizes.items()},
        hidden,
        order={key: _by_part(d.key_heads, parts) for key, parts in sizes.items()},
        any_order=True,
    )
    (out,) = panels.matrices({f"{part}out_proj": hidden}, values)
    group, place = b.places[layer]
    behind = first.panels * LANES
    shape = library.Recurrent(
        group=group,
        layer=place,
        heads=d.value_heads,
        head_dim=d.value_dim,
        groups=d.key_heads,
        state_size=d.key_dim,
        kernel=d.kernel,
        conv_column=0,
        gate_column=d.convolved,
        step_column=behind + d.value_heads,
        write_column=behind,
        norm_groups=d.value_heads,
        gate_first=False,
        gate_scale=1.0,
        step_scale=1.0,
        epsilon=b.config.norm_eps,
        weights=_convolution(b, part, d.convolved, d.kernel),
        rates=panels.floats(_rates(panels.tensor(f"{part}A_log", d.value_heads))),
        step_bias=panels.vector(f"{part}dt_bias", d.value_heads),
        norm=panels.floats(np.tile(panels.tensor(f"{part}norm.weight", d.value_dim), d.value_heads)),
    )
    return _recurrent(b, OpKind.DELTA, shape, [first, second], out, name, b.add(out, apart=apart))


def _recurrent(
    b: Building,
    scan: OpKind,
    shape: library.Recurrent,
    projections: list[Matrix],
    out: Matrix,
    name: str,
    add_output: Op,
) -> list[Op]:
    pointed = b.pointed(shape)
    return [
        b.norm(OpKind.NORM, f"{name}input_layernorm", projections[0]),
        op(OpKind.PROJECT, **dict(zip(("first", "second"), projections, strict=False))),
        op(OpKind.CONVOLVE, recurrent=pointed),
        op(scan, recurrent=pointed),
        op(OpKind.GATE, consumer=out.format, recurrent=pointed),
        add_output,
    ]


def _convolution(b: Building, part: str, channels: int, kernel: int, scales: Floats | None = None) -> int:
    """Returns the address of a convolution's weights, [kernel][channels], each multiplied by its channel's scale."""
    weights = b.panels.tensor(f"{part}conv1d.weight", channels, 1, kernel)[:, 0].T
    return b.panels.floats(weights if scales is None else weights * scales)


def _scales(m: Mamba2) -> Floats:
    """Returns the scale of each channel of the convolution's inputs, float32 [channels]."""
    return np.repeat(np.array(m.input_scales, np.float32), m.convolved_parts)


def _rates(logarithms: Floats) -> Floats:
    """Returns the decay rates of states, rounded to float32."""
    return -np.exp(logarithms, dtype=np.float64).astype(np.float32)


def _by_part(heads: int, sizes: list[int]) -> npt.NDArray[np.int64]:
    """Returns the order that sorts outputs by part. Outputs are stored head by head, each with parts of `sizes`
    outputs; the result has the first parts of all `heads` heads, then the second parts, and so on."""
    whole = np.arange(heads * sum(sizes)).reshape(heads, -1)
    return np.concatenate([part.ravel() for part in np.split(whole, np.cumsum(sizes)[:-1], axis=1)])
