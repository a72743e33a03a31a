"""Requests of training loops: the engine pauses, gives memory back, and computes with other weights or adapters."""

from __future__ import annotations

from typing import Any

import msgspec

from tenuto.base.plan import MemoryPart
from tenuto.base.views import AdapterView, WeightsView
from tenuto.base.wire.request import Request


class Pause(Request[None], frozen=True, kw_only=True):
    """Stop stepping until `Resume`. Open turns wait, or with `release` lose the memory they have acquired and compute
    it again. Sessions may be changed meanwhile."""

    release: bool = False


class Resume(Request[None], frozen=True, kw_only=True):
    """Continue after `Pause`."""


class ReleaseMemory(Request[None], frozen=True, kw_only=True):
    """Return these parts of the model's memory to the system. Sessions keep their tokens, and turns are refused."""

    parts: list[MemoryPart]


class ResumeMemory(Request[None], frozen=True, kw_only=True):
    """Allocate these parts again. Turns continue once all parts are allocated."""

    parts: list[MemoryPart]


MAX_WEIGHT_VERSION = 256
"""The most characters of the version of weights."""


class NewWeights(msgspec.Struct, frozen=True, kw_only=True):
    """How other weights are put to use. `version`: their name, by default the number of updates. With `abort` open
    turns are aborted; otherwise they continue. With `keep_state` sessions keep the state that earlier weights computed;
    otherwise it is dropped."""

    version: str | None = None
    abort: bool = False
    keep_state: bool = False


class UpdateWeights(Request[WeightsView], frozen=True, kw_only=True):
    """Compute with the weights at `path` from now on."""

    path: str
    use: NewWeights = NewWeights()


class NameWeights(Request[None], frozen=True, kw_only=True):
    """Call the weights in use `version` from now on. With `abort` open turns are aborted."""

    version: str
    abort: bool = False


class UpdateTensors(Request[WeightsView], frozen=True, kw_only=True):
    """Like `UpdateWeights`, with some tensors in place of those in use; see `read_tensors` (`bucket`: its
    `flattened`)."""

    pickled: bytes
    bucket: bool = False
    use: NewWeights = NewWeights()


class JoinGroup(Request[None], frozen=True, kw_only=True):
    """Join a group of processes in which a trainer broadcasts weights; see `WeightGroups.join`."""

    group: str
    address: str
    port: int
    rank: int
    size: int


class LeaveGroup(Request[None], frozen=True, kw_only=True):
    """Leave a group of processes."""

    group: str


class ReceiveTensors(Request[WeightsView], frozen=True, kw_only=True):
    """Like `UpdateTensors`, with tensors that the trainer broadcasts; see `WeightGroups.receive`."""

    group: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    bucket: bool = False
    use: NewWeights = NewWeights()


class GetWeight(Request[list[Any]], frozen=True, kw_only=True):
    """Return the first `most` numbers or rows of a tensor of the weights in use, as nested lists."""

    name: str
    most: int


class LoadAdapter(Request[AdapterView], frozen=True, kw_only=True):
    """Read the adapter in the directory `path`, and load it as `name`. `replace`: it takes the place of the loaded one
    of this name."""

    name: str
    path: str
    replace: bool = False


class UnloadAdapter(Request[AdapterView], frozen=True, kw_only=True):
    """Unload an adapter; answers which it was."""

    name: str
