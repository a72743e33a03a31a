"""Sessions with different adapters, which are unloaded, loaded again, and exchange their names."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tenuto.base.options import Policy, SessionAdapter
from tenuto.engine.engine import Engine
from tenuto.exec.witness_hashes import WitnessAdapter, start_of
from tests.sim.naive import PREFILL

if TYPE_CHECKING:
    from tests.sim.mirror import MirroredWorld

NAMES = ("a", "b")
PATHS = {name: f"/adapters/{name}" for name in NAMES}
"""The weights of each adapter when a world begins."""


def digest_of(path: str) -> str:
    return WitnessAdapter(start_of(f"adapter {path}")).digest


def load(engine: Engine, name: str, path: str) -> None:
    engine.adapters.load(name, path, engine.core.executor.read_adapter(path))


def chosen(world: MirroredWorld, policy: Policy) -> Policy:
    """Returns the policy of a session to open, often with an adapter."""
    name = world.adapting.choice((None, *NAMES))
    return policy.with_adapter(SessionAdapter.named(name)) if policy.adapter is None else policy


def resolved(world: MirroredWorld, policy: Policy) -> Policy:
    """Returns the policy that a session opened with `policy` should have."""
    if policy.adapter is None or policy.adapter.digest:
        return policy
    name = policy.adapter.name
    return policy.with_adapter(SessionAdapter(name, digest_of(world.adapters[name])))


def unload_and_load(world: MirroredWorld) -> None:
    """Unloads one or both adapters, which is refused while a turn with one is open. The sessions of an unloaded one
    refuse turns. Then they are loaded again, sometimes under each other's names and in another order."""
    engine, rng = world.engine, world.adapting
    gone = [name for name in (rng.choice((NAMES, NAMES[::-1], ("a",), ("b",)))) if _unload(world, name)]
    refused = {"adapter_not_loaded", "context_exceeded"}
    for sid, naive in list(world.naive.items()):
        adapter = naive.policy.adapter
        if adapter is None or naive.turn is not None or naive.closing:
            continue
        if all(adapter.digest != digest_of(world.adapters[name]) for name in gone):
            continue
        own = world.own(sid)
        world.attempt("submit", refused, partial(engine.turns.submit, sid, [1], PREFILL, **own), sid)
        world.attempt("draft", refused, partial(engine.turns.draft, sid, [1], **own), sid)
    if len(gone) == len(NAMES) and rng.random() < 0.5:
        world.adapters = dict(zip(NAMES, reversed(list(world.adapters.values())), strict=True))
    for name in gone:
        load(engine, name, world.adapters[name])


def _unload(world: MirroredWorld, name: str) -> bool:
    digest = digest_of(world.adapters[name])
    busy = any(
        naive.turn is not None and naive.policy.adapter is not None and naive.policy.adapter.digest == digest
        for naive in world.naive.values()
    )
    reasons = {"adapter_busy"} if busy else set[str]()
    return world.attempt("unload", reasons, lambda: world.engine.adapters.unload(name)) is not None
