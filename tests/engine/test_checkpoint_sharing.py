"""Checkpoints that sessions share are counted once and evicted once."""

from __future__ import annotations

from typing import Any

from tests.engine.stage import FULL, STATE, Stage


def test_forks_share_their_parents_checkpoints_and_evict_no_others() -> None:
    """Known fault: each fork counted them again, and the cache evicted those of others although slots were free."""
    config: dict[str, Any] = {"context_length": 4000, "token_budget": 256, "checkpoint_interval": 64}
    stage = Stage((FULL, STATE), units=1500, recount=False, **config)
    others = [stage.committed(f"s{i}", 500, 1) for i in range(4)]
    stage.committed("prompt", 1000, 1)
    cache, slots = stage.engine.memory.cache, stage.engine.memory.pools[1]
    before = len(cache), slots.leased, [len(session.memory.checkpoints) for session in others]
    forks = [stage.engine.sessions.fork("prompt", child=f"c{i}") for i in range(60)]
    stage.step()
    after = len(cache), slots.leased, [len(session.memory.checkpoints) for session in others]
    assert before == after
    assert cache.evicted == 0
    parent = list(stage.engine.registry.get("prompt").memory.checkpoints)
    assert len(parent) > 10
    assert all(list(fork.memory.checkpoints) == parent for fork in forks)
    stage.engine.audit()
