"""The witness as the forward pass of several ranks: each has all histories as hashes, and they compare these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from tenuto.base.config import EngineOptions
from tenuto.base.errors import InvariantError
from tenuto.base.groups import GroupSpec, MemorySpec
from tenuto.base.plan import Bytes, Ints, Plan, StepResult
from tenuto.exec.logits import Outputs
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.parallel.forward import started
from tenuto.exec.parallel.ranks import GroupRanks
from tenuto.exec.row_edits import Edits, HostEdits
from tenuto.exec.row_options import RowOptions
from tenuto.exec.torch_forward import TorchLogits
from tenuto.exec.witness import WitnessExecutor
from tenuto.exec.witness_hashes import next_token
from tenuto.models.adapter import Adapter
from tenuto.models.config import Attention, Layer, ModelConfig
from tests.engine.stage import VOCABULARY

LAYERS = (Layer(Attention(1, 1, 16, None, 1.0), None),)
"""The witness computes no layers, but a model has some."""
CONFIG = ModelConfig(LAYERS, VOCABULARY, 16, 1e-5, tied=True, max_context=4096, eos=(), bos=None, dtype="float32")


class WitnessRank:
    """A rank's `Forward`, without adapters and heads that guess. It has all histories, as the witness does, so its
    share of a unit is as large as a unit of the witness. Shares leave it marked with its number: in another rank they
    are no hashes of histories. In each step all ranks compare the hashes they would sample from, and each gives its
    share of the logits, which are 1 for the witness's next token and 0 for all others."""

    def __init__(self, page_size: int, groups: Sequence[GroupSpec], ranks: GroupRanks) -> None:
        self.witness = WitnessExecutor(page_size, groups, VOCABULARY)
        self.config, self.spec = CONFIG, self.witness.spec
        self.layout, self.batch_invariant = self.witness.layout, True
        self.defaults: EngineOptions = EngineOptions()
        self.description = "the witness"
        self._ranks, self._mark = ranks, np.uint8(ranks.rank)
        self._share = -(-VOCABULARY // ranks.size)  # of the vocabulary

    def prepare(self, units: tuple[int, ...], rows: int, most_kept: int = 0) -> None:
        self.witness.prepare(units, rows, lookahead=most_kept)

    def apply(self, plan: Plan) -> None:
        self.witness._update_tables(plan)
        self.witness._copy_pages(plan)

    def run(self, plan: Plan, tokens: Ints, outputs: Ints, *, best_only: bool = False) -> Outputs:
        witness, first = self.witness, self._ranks.rank * self._share
        hashes = witness._extend(plan, tokens.astype(np.int64), witness._begins(plan))[outputs]
        found = self._ranks.join(torch.from_numpy(hashes.view(np.int64))[:, None])
        if (found != found[:, :1]).any():
            raise InvariantError(f"ranks have other histories of the rows {plan.rows.tolist()}")
        logits = torch.zeros(len(outputs), self._share)
        for output, state in enumerate(hashes.tolist()):
            token = next_token(state, VOCABULARY)
            if first <= token < first + self._share:
                logits[output, token - first] = 1.0
        return Outputs(TorchLogits(self._ranks.join(logits)[:, :VOCABULARY].contiguous()))

    def edits(self, rows: int) -> Edits:
        return HostEdits(VOCABULARY)

    def decode(self, plan: Plan, tokens: Callable[[], Ints], options: RowOptions) -> Callable[[], StepResult] | None:
        return None

    def remember(self, plan: Plan, following: Ints) -> None:
        raise NotImplementedError

    def predict(self, rows: Ints, positions: Ints, tokens: Ints, sources: Ints) -> Outputs:
        raise NotImplementedError

    def read_units(self, group: int, units: Ints) -> Bytes:
        return self.witness.read_units(group, units) ^ self._mark

    def write_units(self, group: int, units: Ints, data: Sequence[Bytes]) -> None:
        self.witness.write_units(group, units, [each ^ self._mark for each in data])

    def release_units(self) -> None:
        self.witness.release(["kv_cache"])

    @property
    def packer(self) -> Callable[[Adapter], object]:
        return lambda adapter: adapter

    def set_adapter(self, slot: int, packed: object | None) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.witness.close()


def witness_of_ranks(page_size: int, groups: Sequence[GroupSpec], size: int) -> ModelExecutor:
    """Starts the processes, and returns their executor. The sizes of units in `groups` do not count: a rank's share is
    as large as a unit of the witness."""
    builds = [partial(WitnessRank, page_size, groups)] * size
    whole = tuple(GroupSpec(each.kind, size * 16 * page_size, each.window) for each in groups)
    return ModelExecutor(started(builds, ["cpu"] * size, CONFIG, MemorySpec(page_size, whole)))
