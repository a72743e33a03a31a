"""Machines with several memory nodes (NUMA), whose cores reach the memory of their own node fastest; Linux only."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_SYSTEM = Path("/sys/devices/system/node")
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}.get(platform.machine())
"""The numbers of `set_mempolicy(2)` and `get_mempolicy(2)`, which the C library does not wrap."""
_DEFAULT, _INTERLEAVE = 0, 3
"""Policies: memory of the node whose core first writes to it, and of all nodes in turn."""


class Node(NamedTuple):
    """A memory node: its number, and those of its cores that this process may use."""

    number: int
    cores: tuple[int, ...]


def usable_nodes(system: Path = _SYSTEM) -> list[Node]:
    """Returns the nodes with cores that this process may use, in order; none where the system does not tell. `system`:
    a folder for each node, with its cores in `cpulist` (see the kernel's `sysfs-devices-node`)."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    found = []
    try:
        for path in system.glob("node[0-9]*"):
            cores = _numbers((path / "cpulist").read_text(encoding="ascii")) & usable
            if cores:
                found.append(Node(int(path.name.removeprefix("node")), tuple(sorted(cores))))
    except OSError:
        return []
    return sorted(found)


def _numbers(text: str) -> set[int]:
    """Returns the numbers of a list such as `0-3,8`."""
    ranges = (part.split("-") for part in text.strip().split(",") if part)
    return {number for first, *last in ranges for number in range(int(first), int((last or [first])[0]) + 1)}


def node_of(member: int, threads: int, found: Sequence[Node]) -> Node:
    """Returns the node for one of `threads` threads. Each node gets a run of them in proportion to its cores, so that
    neighbouring threads, which read neighbouring weights, are on one node."""
    cores = [node for node in found for _ in node.cores]
    return cores[member * len(cores) // threads]


@contextmanager
def interleaved(found: Sequence[Node]) -> Iterator[None]:
    """What the calling thread, or a thread that it starts, first writes to within the block lies on all nodes in turn,
    if there are several. So all nodes are read at once, whichever thread reads. Nothing changes where the system does
    not allow that, as in some containers, or where the thread already has a policy, as under `numactl`."""
    applied = len(found) > 1 and policy() == _DEFAULT and _set_policy(_INTERLEAVE, found)
    try:
        yield
    finally:
        if applied:
            _set_policy(_DEFAULT, ())


def policy() -> int | None:
    """Returns the number of the calling thread's policy; None where the system does not tell."""
    found = ctypes.c_int()
    asked = _call(1, ctypes.byref(found), None, ctypes.c_ulong(0), None, ctypes.c_ulong(0))
    return found.value if asked else None


def _set_policy(policy: int, found: Sequence[Node]) -> bool:
    words = (ctypes.c_ulong * (1 + max((node.number for node in found), default=0) // 64))()
    for node in found:
        words[node.number // 64] |= 1 << node.number % 64
    bits = ctypes.c_ulong(64 * len(words) + 1)  # the kernel reads one bit less
    return _call(0, policy, words if found else None, bits)


def _call(which: int, *arguments: object) -> bool:
    """Makes one of `_CALLS`. Returns whether the system has carried it out."""
    if _CALLS is None or not sys.platform.startswith("linux"):
        return False
    failed: int = ctypes.CDLL(None).syscall(ctypes.c_long(_CALLS[which]), *arguments)
    return failed == 0
