"""Worlds of replicas that share conversations and batches keep their promises, and notice planted faults."""

from __future__ import annotations

import pytest

from tenuto.base.errors import TenutoError
from tests.sim.faults_of_objects import FAULTS, Plant
from tests.sim.objects import Violation, simulate


@pytest.mark.parametrize("seed", range(3))
def test_replicas_that_fail_sleep_and_lose_messages_keep_conversations_and_batches(seed: int) -> None:
    assert simulate(seed).operations > 50


@pytest.mark.parametrize("plant", FAULTS)
def test_a_planted_fault_of_objects_is_noticed(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((Violation, TenutoError, LookupError)):
        simulate(FAULTS[plant])
