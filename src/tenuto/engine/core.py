"""The objects that all parts of an engine share."""

from __future__ import annotations

from dataclasses import dataclass, field

from tenuto.base.clock import Clock
from tenuto.base.config import EngineConfig
from tenuto.base.plan import Executor
from tenuto.engine.counts import Counts
from tenuto.engine.guard import Fuse
from tenuto.engine.outcomes import Outcomes
from tenuto.engine.parking import Parking
from tenuto.engine.restores import Restores
from tenuto.memory.memory import Memory
from tenuto.sched.batch import Batch
from tenuto.sched.guesses import Proposer
from tenuto.sched.queue import WaitingQueue
from tenuto.session.adapters import Adapters
from tenuto.session.prefixes import PrefixIndex
from tenuto.session.registry import Registry


@dataclass(frozen=True, slots=True)
class Core:
    """The memory, sessions and turns of one engine, its proposer, clock, counters and fuse."""

    config: EngineConfig
    executor: Executor
    clock: Clock
    memory: Memory
    idle_memory: Parking
    restores: Restores
    registry: Registry
    prefixes: PrefixIndex
    queue: WaitingQueue
    batch: Batch
    proposer: Proposer | None = None
    adapters: Adapters = field(default_factory=Adapters)
    counts: Counts = field(default_factory=Counts)
    outcomes: Outcomes = field(default_factory=Outcomes)
    fuse: Fuse = field(default_factory=Fuse)
