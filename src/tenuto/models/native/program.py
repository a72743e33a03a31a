"""Translates a model with any mix of layers to a list of operations of the native kernels."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tenuto.base.errors import ModelError
from tenuto.kernels.elements import Element, KVCacheDtype
from tenuto.kernels.native import library
from tenuto.kernels.native.library import Matrix, Op, OpKind
from tenuto.kernels.native.pack import LANES
from tenuto.kernels.native.shared_memory import WeightMemory
from tenuto.models.config import PREDICTOR, Layer, ModelConfig
from tenuto.models.groups import layer_groups, memory_spec
from tenuto.models.native.building import Building, group_of, op
from tenuto.models.native.feed_forward import feed_forward
from tenuto.models.native.key_scales import UNSCALED, KeyScales, key_scales
from tenuto.models.native.mixers import mixer
from tenuto.models.native.obstacle import obstacle
from tenuto.models.native.panels import Panels
from tenuto.models.weights import StoredWeight


class NativeProgram:
    """A model's weights, and the operations of its forward pass.

    Keys and values are bfloat16 or of another `KVCacheDtype`, in whole blocks of 16 token slots. States of convolutions
    and recurrences are float32.
    Invariant: the memory that `ops` and `model` point to lives as long as this object.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, StoredWeight]],
        page_size: int,
        *,
        plain: bool = False,
        kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO,
        scales: KeyScales | None = None,
        memory: WeightMemory | None = None,
    ) -> None:
        """`weights` are those of `ModelCheckpoint.weights`; with `plain` they are converted to bfloat16. They are
        packed into `memory`, by default that of this process. Weights that replace others take over the `scales` of
        keys, since memory may hold keys that were multiplied by them. Raises `ModelError` if a weight is missing,
        unknown or of a wrong shape, or if there is an `obstacle`."""
        reason = obstacle(config)
        if reason is not None:
            raise ModelError(f"the native kernels cannot run this model: {reason}")
        self.config = config
        self.plain = plain
        self.kv_cache_dtype = kv_cache_dtype
        self._panels = Panels(weights, plain=plain, memory=memory)
        if scales is None:
            scales = key_scales(config, self._panels) if kv_cache_dtype.scaled_keys else UNSCALED
        self.key_scales = scales
        groups = layer_groups(
            config, Element.BFLOAT16, convolutions=Element.FLOAT32, kv_type=kv_cache_dtype, wide=scales.wide
        )
        self.spec = memory_spec(groups, page_size, -(-page_size // LANES) * LANES)
        self._building = Building(config, self._panels, groups, scales.scales)
        ops, head = self._operations()
        self.whole = range(len(ops))
        """The operations of the model itself, among `ops`; behind them are those of its head."""
        self.head = range(len(ops), len(ops) + len(head))
        ops += head
        self.keys = range(self.head.start, 1 + max((i for i in self.head if ops[i].kind == OpKind.QKV), default=-1))
        """Those of the head that store its keys and values."""
        self._panels.end()
        self.weight_bytes = self._panels.size  # in memory
        self.ops = (Op * len(ops))(*ops)
        self.adaptable = [
            (number, which, name)
            for number, made in enumerate(ops)
            for which, matrix in enumerate((made.first, made.second, made.third))
            if (name := self._panels.names.get(matrix.data)) is not None
        ]
        """The matrices of operations: the operation's index, 0 to 2, and the weight's name without `.weight`."""
        self.orders = self._panels.orders
        """The orders of matrices that are not packed as they are, by their names."""
        ropes, made = self._building.ropes(), [group_of(group) for group in groups]
        self.model = library.Model(
            config.hidden,
            config.vocab,
            page_size,
            len(made),
            len(ropes),
            (library.Group * len(made))(*made),
            ropes,
        )

    def _operations(self) -> tuple[list[Op], list[Op]]:
        """Returns the operations of the model itself, and those of its head for multi-token prediction."""
        c, b = self.config, self._building
        (embedding,) = self._panels.matrices({"model.embed_tokens": c.vocab}, c.hidden)
        ops, mixers, of_head = [op(OpKind.EMBED, first=embedding, scale=c.embedding_scale)], 0, list[Op]()
        for number, (name, layer) in enumerate(c.named_layers(), 1):
            is_last = number == len(c.layers) and not c.predictor  # a head takes the outputs of all tokens
            of_layer = self._layer(layer, name, mixers, is_last=is_last)
            if name.startswith(PREDICTOR):
                of_head += of_layer
            else:
                ops += of_layer
            mixers += len(layer.mixers)
        head = embedding if c.tied else self._panels.matrices({"lm_head": c.vocab}, c.hidden, any_order=True)[0]
        logits = op(OpKind.LOGITS, first=head, scale=c.logit_scale, cap=c.logit_cap)
        ops += [b.norm(OpKind.SELECT, "model.norm", head), logits]
        if not c.predictor:
            return ops, []
        ops.append(b.norm(OpKind.KEEP, "model.norm", head))
        last = f"{PREDICTOR}norm"
        of_head = [*self._join(embedding), *of_head, b.norm(OpKind.SELECT, last, head), logits]
        return ops, [*of_head, b.norm(OpKind.KEEP, last, head)]

    def _join(self, embedding: Matrix) -> list[Op]:
        """Returns the first operations of the head, which project embeddings and outputs of the last norm together."""
        c, panels = self.config, self._panels
        (join,) = panels.matrices({f"{PREDICTOR}fc": c.hidden}, 2 * c.hidden)
        norms = [panels.tensor(f"{PREDICTOR}pre_fc_norm_{of}.weight", c.hidden) for of in ("embedding", "hidden")]
        joined = op(
            OpKind.JOIN,
            first=embedding,
            consumer=join.format,
            epsilon=c.norm_eps,
            scale=c.embedding_scale,
            norm=panels.floats(np.concatenate(norms)),
        )
        return [joined, op(OpKind.ADD, first=join)]

    def _layer(self, layer: Layer, name: str, first: int, *, is_last: bool) -> list[Op]:
        """Returns the operations of a layer. The names of its weights begin with `name`; `first` is the number of its
        first mixer. Behind the mixers of the last layer, only the tokens whose logits are wanted are computed."""
        b, apart, ops = self._building, layer.post_norms or layer.beside is not None, list[Op]()
        for number, mixing in enumerate(layer.mixers, first):
            ops += mixer(b, mixing, number, name, apart=apart)
        if layer.mixers and apart:
            ops.append(b.post(f"{name}mixer_post_norm" if layer.post_norms else None))
        if layer.feed_forward is not None:
            if is_last:
                ops.append(op(OpKind.NARROW))
            ops += feed_forward(b, layer.feed_forward, name, apart=layer.post_norms)
            if layer.post_norms:
                ops.append(b.post(f"{name}mlp_post_norm"))
        return ops
