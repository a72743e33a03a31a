"""Worlds of replicas that share conversations and batches keep their promises, and notice planted faults."""

from __future__ import annotations

import pytest

from tests.sim.faults_of_objects import FAULTS, Plant, find
from tests.sim.objects import simulate


@pytest.mark.parametrize("seed", range(3))
def test_replicas_that_fail_sleep_and_lose_messages_keep_conversations_and_batches(seed: int) -> None:
    assert simulate(seed).operations > 50


@pytest.mark.parametrize("plant", FAULTS)
def test_a_planted_fault_of_objects_is_noticed(plant: Plant) -> None:
    assert find(plant) is not None
