"""The interface of a model's forward pass to the model executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tenuto.base.config import EngineOptions
from tenuto.base.groups import MemorySpec
from tenuto.base.plan import Bytes, Ints, Plan, StepResult
from tenuto.exec.logits import Outputs
from tenuto.exec.row_edits import Edits
from tenuto.exec.row_options import RowOptions
from tenuto.models.adapter import Adapter
from tenuto.models.config import ModelConfig


class Forward(Protocol):
    """A model on a device, with the memory for its turns."""

    @property
    def config(self) -> ModelConfig:
        """The shape of the model."""

    @property
    def spec(self) -> MemorySpec:
        """The memory groups of the model."""

    @property
    def layout(self) -> str:
        """See `Executor.layout`."""

    @property
    def batch_invariant(self) -> bool:
        """See `Executor.batch_invariant`."""

    @property
    def defaults(self) -> EngineOptions:
        """See `Executor.defaults`."""

    @property
    def description(self) -> str:
        """A description, for people, of the code and device that compute."""

    def prepare(self, units: tuple[int, ...], rows: int, most_kept: int = 0) -> None:
        """See `Executor.prepare`. `most_kept`: the number of tokens of a row whose inputs may be kept. Raises
        `ConfigError` if the device cannot hold so many units."""

    def apply(self, plan: Plan) -> None:
        """Applies the plan's changes of page tables, then its copies of pages."""

    def run(self, plan: Plan, tokens: Ints, outputs: Ints, *, best_only: bool = False) -> Outputs:
        """Computes `tokens`, int32 [sum(plan.counts)], and the sums of `plan.vectors`. `outputs`, int32 [outputs], are
        the indices in `tokens` after which logits are wanted, or, with `best_only`, the likeliest token alone."""

    def edits(self, rows: int) -> Edits:
        """Returns the edits of `rows` rows, none of which has any yet. A forward pass of the same model's shape may go
        on with them."""

    def decode(self, plan: Plan, tokens: Callable[[], Ints], options: RowOptions) -> Callable[[], StepResult] | None:
        """Starts a step, and waits for its masks, if it has any, but not for the step. It computes `tokens()`, int32
        [tokens], in which `PREVIOUS_SAMPLE` stands for what the row sampled last, in such a step, and samples by
        `options`, whose edits are results of `edits`, and the masks. Returns a function that waits for the step and
        returns its result. Returns None, having done nothing, if `plan` must be computed by `apply` and `run`."""

    def remember(self, plan: Plan, following: Ints) -> None:
        """Stores the head's keys and values for the tokens that `run` has just computed. `following`, int32 [tokens]:
        the token after each."""

    def predict(self, rows: Ints, positions: Ints, tokens: Ints, sources: Ints) -> Outputs:
        """Computes the head for a token of each of `rows`, and stores its keys and values at `positions`. It continues
        from the output of the last `run`, or of `predict` if that came later, for the token with index `sources[i]`
        there, and `tokens[i]` after it; all int32 [rows]. Returns what may follow that token. Results of `run` are not
        valid any more."""

    def read_units(self, group: int, units: Ints) -> Bytes:
        """See `Copier.read_units`."""

    def write_units(self, group: int, units: Ints, data: Sequence[Bytes]) -> None:
        """See `Copier.write_units`."""

    def release_units(self) -> None:
        """Gives the memory of all units back to the system; `prepare` allocates it again."""

    @property
    def packer(self) -> Callable[[Adapter], object]:
        """A function for any thread. It returns an adapter in the form that forward passes of this kind compute with,
        and does not refer to this object."""

    def set_adapter(self, slot: int, packed: object | None) -> None:
        """See `Executor.set_adapter`; `packed` is a result of `packer`, perhaps of an earlier forward pass of the same
        model's shape."""

    def close(self) -> None:
        """Releases weights, threads and memory."""


def describe(units: Sequence[int], spec: MemorySpec, kept: int) -> str:
    """Describes, for people, the number and size of the units of each group, and of `kept` tokens' inputs."""
    parts = [
        f"{n} {'pages' if group.paged else 'state slots'} ({n * group.bytes_per_unit} bytes)"
        for n, group in zip(units, spec.groups, strict=True)
    ]
    if size := kept * sum(group.bytes_per_input for group in spec.groups):
        parts.append(f"inputs of {kept} guessed tokens ({size} bytes)")
    return ", ".join(parts)
