"""Machines with several memory nodes: here, a description of one, since this machine may have one node only."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tenuto.base.config import cache_dir
from tenuto.exec.device import usable_cores
from tenuto.exec.load import ExecutorOptions, load_executor
from tenuto.exec.model_executor import ModelExecutor
from tenuto.exec.nodes import Node, interleaved, node_of, policy, usable_nodes
from tenuto.models.store import resolve
from tests.exec.kernels import HERE, cores_of_threads
from tests.models.tiny import save_hf, tiny_llama

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory nodes are known on Linux only")

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
NO_CORE = 60_000


def test_nodes_have_the_cores_that_this_process_may_use(tmp_path: Path) -> None:
    first, *others = CORES
    lists = {"node10": f"{NO_CORE}", "node2": f"{first},{NO_CORE}-{NO_CORE + 3}", "node0": ",".join(map(str, others))}
    for name, cores in lists.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(f"{cores}\n", encoding="ascii")
    (tmp_path / "online").write_text("0,2,10\n", encoding="ascii")
    expected = [Node(0, tuple(others)), Node(2, (first,))] if others else [Node(2, (first,))]
    assert usable_nodes(tmp_path) == expected
    assert usable_nodes(tmp_path / "missing") == []


def test_this_machines_nodes_have_its_cores() -> None:
    assert sorted(core for node in usable_nodes() for core in node.cores) in ([], CORES)


@pytest.mark.parametrize(("threads", "counts"), [(6, (4, 2)), (3, (2, 1)), (1, (1, 0))])
def test_nodes_get_runs_of_threads_in_proportion_to_their_cores(threads: int, counts: tuple[int, int]) -> None:
    found = [Node(0, (0, 1, 2, 3)), Node(1, (4, 5))]
    numbers = [node_of(member, threads, found).number for member in range(threads)]
    assert numbers == [0] * counts[0] + [1] * counts[1]


def test_memory_is_interleaved_within_the_block_only() -> None:
    before, several = policy(), [Node(0, (0,)), Node(1, (1,))]
    with interleaved(several[:1]):
        assert policy() == before
    with interleaved(several):
        within = policy()
        with interleaved(several):
            assert policy() == within
        assert policy() == within, "a policy from before was given up"
    assert policy() == before
    if within == before:
        pytest.skip("this process already has a memory policy, or may not change it")
    assert (before, within) == (0, 3)


def executor(path: Path, nodes: list[Node], said: list[str]) -> ModelExecutor:
    options = ExecutorOptions(16, cache=cache_dir(), nodes=nodes, say=said.append)
    return load_executor(resolve(str(path), path), options)


@pytest.mark.skipif(not HERE.variants() or len(CORES) < 2, reason="no native kernels, or one core")
@pytest.mark.skipif(usable_cores() < len(CORES), reason="this process may not use all cores at once")
def test_threads_stay_on_their_nodes_if_the_system_can_keep_them_there(tmp_path: Path) -> None:
    path, half, said = save_hf(tmp_path, tiny_llama()), len(CORES) // 2, list[str]()
    free = executor(path, [Node(0, tuple(CORES))], said)
    assert "memory nodes" not in free.forward.description
    assert set(map(tuple, cores_of_threads())) == {tuple(CORES)}
    free.close()
    kept = executor(path, [Node(0, tuple(CORES[:half])), Node(1, tuple(CORES[half:]))], said)
    assert "on 2 memory nodes" in kept.forward.description
    assert cores_of_threads().count(CORES[half:]) == len(CORES) - half
    kept.close()
    assert not any("memory nodes" in message for message in said)
    lost = executor(path, [Node(0, tuple(CORES[:-1])), Node(1, (NO_CORE,))], said)
    assert "memory nodes" not in lost.forward.description
    assert set(map(tuple, cores_of_threads())) == {tuple(CORES)}
    assert said[-1] == "The system does not let threads be kept on memory nodes"
    lost.close()
