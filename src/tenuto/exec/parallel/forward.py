"""The forward pass of a model whose parts are computed by several processes. This one is the first rank."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from tenuto.base.errors import ConfigError, ExecutorLost
from tenuto.base.groups import MemorySpec
from tenuto.base.plan import Bytes, Ints, Plan, StepResult
from tenuto.exec.device import is_cpu, usable_cores
from tenuto.exec.forward import Forward
from tenuto.exec.logits import Outputs
from tenuto.exec.parallel.followers import Build, Followers, Refused, Start
from tenuto.exec.parallel.ranks import GroupRanks, part_forward
from tenuto.exec.row_edits import Edits, HostEdits
from tenuto.exec.row_options import RowOptions
from tenuto.exec.torch_load import Part
from tenuto.models.adapter import Adapter
from tenuto.models.checkpoint import ModelCheckpoint
from tenuto.models.config import ModelConfig
from tenuto.models.groups import layer_groups, memory_spec
from tenuto.models.shards import shard_adapter, shard_config


def parallel_forward(whole: Part, size: int, checkpoint: ModelCheckpoint) -> ParallelForward:
    """Divides a model among `size` processes, and starts the others. Raises `ConfigError` or `ModelError`."""
    config, threads = shard_config(whole.config, size), max(1, usable_cores() // size)
    parts = [replace(whole, config=config, device=_device(whole.device, rank)) for rank in range(size)]
    opened = [checkpoint, *[None] * (size - 1)]  # each process opens the files
    builds = [partial(part_forward, part, threads, own) for part, own in zip(parts, opened, strict=True)]
    spec = memory_spec(layer_groups(whole.config, whole.element), whole.page_size)
    return started(builds, [part.device for part in parts], whole.config, spec)


def started(builds: Sequence[Build], devices: Sequence[str], config: ModelConfig, spec: MemorySpec) -> ParallelForward:
    """Starts the other ranks, and builds the forward pass of all: `builds[i]` is that of rank i, on `devices[i]`. The
    model as a whole has this `config` and `spec`. Raises `ConfigError` or `ModelError`."""
    size, folder = len(builds), Path(tempfile.mkdtemp(prefix="tenuto-ranks-"))
    meeting = str(folder / "meeting")
    each = zip(builds, range(size), devices, strict=True)
    starts = [Start(build, rank, size, meeting, device) for build, rank, device in each]
    try:
        followers = Followers(starts[1:])
        try:
            ranks = GroupRanks(0, size, meeting, devices[0])
            own = builds[0](ranks)
            _raise_refused(followers.answers())
            followers.tell("connect")
            ranks.connect()
            followers.answers()  # nobody needs the folder from here on
        except BaseException as error:
            followers.close()
            if isinstance(error, OSError | EOFError | RuntimeError):
                raise ConfigError(f"the {size} processes of the model did not start: {error}") from error
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ParallelForward(own, config, spec, size, followers)


def _device(device: str, rank: int) -> str:
    return device if is_cpu(device) else f"{device}:{rank}"


def _raise_refused(answers: Sequence[Any]) -> None:
    """Raises `ConfigError` if one of the followers refuses."""
    refused = [f"rank {i}: {each.reason}" for i, each in enumerate(answers, start=1) if isinstance(each, Refused)]
    if refused:
        raise ConfigError("; ".join(refused))


class ParallelForward:
    """A `Forward` of which every rank computes a part. This is the first rank: it sends each call to the others, makes
    it itself, and samples from its logits. A unit's bytes are those of all ranks, in their order.

    One lock is held from sending a call until the operation is done here, so that all ranks do the same in the same
    order. An error during an operation leaves them out of step, so it ends them and raises `ExecutorLost`.
    """

    def __init__(self, own: Forward, config: ModelConfig, spec: MemorySpec, size: int, followers: Followers) -> None:
        self.config, self.spec = config, spec
        self.layout = f"{own.layout}, {size} parts"
        self.batch_invariant = False
        self.defaults = own.defaults
        self.description = f"{own.description}, {size} processes"
        self._own, self._size, self._followers = own, size, followers
        self._lock = threading.Lock()
        self._lost: ExecutorLost | None = None

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Holds the lock, and raises `ExecutorLost` for errors, except for a `ConfigError`."""
        with self._lock:
            if self._lost is not None:
                raise self._lost
            try:
                yield
            except ConfigError:
                raise
            except Exception as error:
                reason = self._followers.ended() or f"{type(error).__name__}: {error}"
                self._lost = ExecutorLost(f"the processes that compute the model together have stopped: {reason}")
                self._followers.close()
                raise self._lost from error

    def prepare(self, units: tuple[int, ...], rows: int, most_kept: int = 0) -> None:
        """See `Forward.prepare`."""
        with self._together():
            self._followers.tell("prepare", units, rows, most_kept)
            own: ConfigError | None = None
            try:
                self._own.prepare(units, rows, most_kept)
            except ConfigError as error:
                own = error
            answers = self._followers.answers()
            if own is None and not any(isinstance(each, Refused) for each in answers):
                return
            # Those that have allocated their part release it.
            self._followers.tell_each("release_units", [None if isinstance(each, Refused) else () for each in answers])
            if own is not None:
                raise own
            self._own.release_units()
            _raise_refused(answers)

    def apply(self, plan: Plan) -> None:
        """See `Forward.apply`."""
        with self._together():
            self._followers.tell("apply", _sent(plan))
            self._own.apply(plan)

    def run(self, plan: Plan, tokens: Ints, outputs: Ints, *, best_only: bool = False) -> Outputs:
        """See `Forward.run`."""
        with self._together():
            self._followers.tell("run", _sent(plan), tokens, outputs)
            return self._own.run(plan, tokens, outputs, best_only=best_only)

    def edits(self, rows: int) -> Edits:  # noqa: ARG002 - used by other forward passes
        """See `Forward.edits`."""
        return HostEdits(self.config.vocab)

    def decode(
        self,
        plan: Plan,  # noqa: ARG002 - used by other forward passes
        tokens: Callable[[], Ints],  # noqa: ARG002
        options: RowOptions,  # noqa: ARG002
    ) -> Callable[[], StepResult] | None:
        """See `Forward.decode`; every step is computed by `apply` and `run`."""
        return None

    def remember(self, plan: Plan, following: Ints) -> None:
        """See `Forward.remember`."""
        with self._together():
            self._followers.tell("remember", _sent(plan), following)
            self._own.remember(plan, following)

    def predict(self, rows: Ints, positions: Ints, tokens: Ints, sources: Ints) -> Outputs:
        """See `Forward.predict`."""
        with self._together():
            self._followers.tell("predict", rows, positions, tokens, sources)
            return self._own.predict(rows, positions, tokens, sources)

    def read_units(self, group: int, units: Ints) -> Bytes:
        """See `Forward.read_units`."""
        with self._together():
            self._followers.tell("read_units", group, units)
            own = self._own.read_units(group, units)
            return np.concatenate([own, *self._followers.answers()], axis=1)

    def write_units(self, group: int, units: Ints, data: Sequence[Bytes]) -> None:
        """See `Forward.write_units`. Waits for the step in flight."""
        parts = [np.split(each, self._size) for each in data]
        with self._together():
            of_ranks = [[each[rank] for each in parts] for rank in range(self._size)]
            self._followers.tell_each("write_units", [(group, units, part) for part in of_ranks[1:]])
            self._own.write_units(group, units, of_ranks[0])

    def release_units(self) -> None:
        """See `Forward.release_units`."""
        with self._together():
            self._followers.tell("release_units")
            self._own.release_units()

    @property
    def packer(self) -> Callable[[Adapter], Adapter]:
        """See `Forward.packer`. Each rank packs its own part."""
        return _as_read

    def set_adapter(self, slot: int, packed: object | None) -> None:
        """See `Forward.set_adapter`."""
        adapter = cast("Adapter | None", packed)
        with self._together():
            self._followers.tell("set_adapter", slot, adapter)
            own = self._own.packer(shard_adapter(adapter, 0, self._size)) if adapter is not None else None
            self._own.set_adapter(slot, own)

    def close(self) -> None:
        """Ends the other ranks."""
        with self._lock:
            if self._lost is None:
                self._lost = ExecutorLost("the model is closed")
                self._followers.close()
                self._own.close()


def _as_read(adapter: Adapter) -> Adapter:
    return adapter


def _sent(plan: Plan) -> Plan:
    """Returns what the other ranks need of a plan."""
    return replace(plan, masks=(), sampling=())
