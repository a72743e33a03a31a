"""Small slips in what keeps state of other weights apart. See `slips`."""

from tests.sim.slips import Slip

OF_TRAINING = (
    Slip(
        "memory.turn_memory",
        "self.lineage = extended(self.lineage, self._scheduled, self.memory.weights)",
        "self.lineage = self.lineage or extended((), 0, self.memory.weights)",
    ),
    Slip(
        "memory.turn_memory",
        "self.lineage = extended(self.lineage, self._scheduled, self.memory.weights)",
        "self.lineage = self.memory.current",
    ),
    Slip("memory.turn_memory", "        session.lineage = self.lineage\n", ""),
    Slip(
        "memory.turn_memory", "        child.lineage = self.lineage\n", "        child.lineage = self.session.lineage\n"
    ),
    Slip(
        "memory.committed",
        "        child.lineage = self.lineage\n",
        "        child.lineage = self.memory.current if self.lineage else ()\n",
    ),
    Slip(
        "memory.committed",
        "self.computed, self.lineage = position, cut(self.lineage, position)",
        "self.computed = position",
    ),
    Slip(
        "memory.committed",
        "        self.lineage = lineage\n        self.stand_at",
        "        self.lineage = self.memory.current\n        self.stand_at",
    ),
    Slip(
        "memory.lineage",
        "return tuple(stamp for stamp in lineage if stamp.start < position)",
        "return tuple(stamp for stamp in lineage if stamp.start <= position)",
    ),
    Slip(
        "memory.lineage",
        "return all(stamp.weights.identity == weights.identity for stamp in lineage)",
        "return any(stamp.weights.identity == weights.identity for stamp in lineage) or not lineage",
    ),
    Slip("memory.tiers.contents", "stamp in self._lineage[1:] if start", "stamp in self._lineage[2:] if start"),
    Slip("memory.tiers.contents", 'digest.update(self._lineage[0].weights.mark if self._lineage else b"")', "pass"),
    Slip(
        "memory.tiers.contents",
        "            self._kept.clear()\n        self._lineage",
        "            pass\n        self._lineage",
    ),
    Slip(
        "memory.tiers.tiers",
        "shared = Parked(position, units, cut(lineage, position))",
        "shared = Parked(position, units, lineage[-1:])",
    ),
    Slip(
        "session.prefixes",
        "usable = session.memory.computed if session.memory.is_current else 0",
        "usable = session.memory.computed",
    ),
    Slip("engine.sharing", " or not self._is_current(turn)", ""),
    Slip(
        "engine.parking",
        "position = self._sessions.get(session), self._settled(session) if session.memory.is_current else 0",
        "position = self._sessions.get(session), self._settled(session)",
    ),
    Slip("engine.parking", " and is_pure(parked.lineage, self._memory.weights):", ":"),
    Slip("engine.parking", "                self._find(session)\n", "                pass\n"),
    Slip(
        "engine.parking",
        "        self.saves.forget_all()\n        self.tiers.become",
        "        self.tiers.become",
    ),
    Slip("engine.session_states", "            if not memory.is_current:\n                return nothing\n", ""),
    Slip(
        "engine.session_states",
        "        if not self._idle_memory.is_parked_current(session):\n            return nothing\n",
        "",
    ),
    Slip(
        "engine.occupation",
        "        for session in self._sessions if keep else ():\n            self._lifecycle.note_memory(session)\n",
        "",
    ),
    Slip(
        "engine.occupation",
        "        for session in list(self._sessions.prefixes):\n            self._lifecycle.flush(session)\n",
        "",
    ),
    Slip(
        "engine.occupation",
        "self._executor.restore((), weights, [pool.leased_units() for pool in self._memory.pools])",
        "self._executor.restore((), weights)",
    ),
    Slip(
        "engine.occupation",
        "        self._updates += 1\n        self._note_weights()\n",
        "        self._updates += 1\n",
    ),
    Slip(
        "engine.occupation",
        "        self._note_weights()\n        self._memory.weights = self",
        "        self._memory.weights = self",
    ),
    Slip(
        "memory.tiers.unit_files",
        "self._readable = {identity, *(self._readable if keep else ())}",
        "self._readable = {identity}",
    ),
)
"""Slips that mix state of different weights, or lose what was to be kept."""
