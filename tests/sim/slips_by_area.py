"""More slips, grouped by area. See `slips`."""

from __future__ import annotations

from tests.sim.slips import Slip

ERASING = (
    Slip("memory.pool", "            self.used[unit] = 1\n", ""),
    Slip("memory.tiers.copies", "            unit.data.fill(0)", "            pass"),
    Slip("memory.tiers.copies", "            if unit not in without:\n", "            if True:\n"),
    Slip("memory.tiers.erasing", "if unit.references == count}", "if unit.references >= count}"),
    Slip("engine.erasure", "        for kept in [kept for kept in core.registry.prefixes if _shares(held, kept)]:\n            self._lifecycle.drop(kept)\n", ""),
    Slip("engine.erasure", "        self._core.idle_memory.finish()\n", ""),
    Slip("engine.erasure", "            session.state = SessionState.OPEN", "            pass"),
    Slip("sched.draft_proposer", "        self._beside.forget(tenant)\n        self._model.tables.clear()\n", "        self._beside.forget(tenant)\n"),
    Slip("memory.tiers.state_index", "secure_delete = ON", "secure_delete = OFF"),
    Slip("memory.tiers.erasing", "    _empty_log(tiers, erased)\n", ""),
)  # fmt: skip
"""Erasures leave something behind."""

MAPS = (
    Slip("sched.pressure", "            self.noted[session] = None\n", "            pass\n"),
    Slip("engine.watch", "        noted |= dict.fromkeys(turn.session for turn in running)\n", ""),
    Slip("engine.watch", "            for holder in session.memory.holders()\n", "            for holder in (session.memory,)\n"),
    Slip("engine.watch", "                elif session in self._numbers:", "                elif False:"),
)  # fmt: skip
"""The map shows other holders than there are."""

HOLES = (
    Slip("memory.pool", "        self.generation[unit] += 1\n\n    def take_alone", "\n    def take_alone"),
    Slip("memory.kinds.paged", "elif position % self.page_size == 0 or not self.has_tail(page, position):", "elif position % self.page_size == 0:"),
    Slip("memory.kinds.full", "began = self.first * self.page_size + self._copy_slots", "began = self.first * self.page_size"),
    Slip("memory.tiers.copies", "        if copy.content.covers(content):\n            return copy", "        if True:\n            return copy"),
    Slip("engine.restores", "if not any(move in self._tiers.moves for move in each.moves)]", "if not all(move in self._tiers.moves for move in each.moves)]"),
    Slip("engine.parking", "return memory.computed if memory.computed < len(session.history) and not memory.arriving else 0", "return memory.computed"),
    Slip("engine.session_states", "            first += len(piece)", "            pass"),
    Slip("engine.occupation", "self._idle_memory.weights_change(self._sessions, identity, keep=keep)", "pass"),
    Slip("session.journal_changes", "WHERE piece = ? LIMIT 2", "WHERE piece = ? LIMIT 1"),
    Slip("session.journal_changes", "row = session, position, piece, length - position", "row = session, position, piece, length - position + 1"),
    Slip("session.prefixes", "        self.version += 1\n", ""),
    Slip("sched.admission", "                    self._room_for = None\n", "                    pass\n"),
)  # fmt: skip
"""Slips that an attack on this proof found to be uncaught."""

GRAMMARS = (
    Slip("text.compiled", "self._kept.move_to_end(grammar)", "pass"),
    Slip("text.compiled", "popitem(last=False)", "popitem()"),
    Slip("text.grammars", "if not self._matcher.validate_tokens([token]):", "if self._matcher.validate_tokens([token]):"),
    Slip("text.grammars", "return Constraint(matcher, len(first), first)", "return Constraint(matcher, len(first), np.full_like(first, 0xFFFFFFFF))"),
    Slip("text.masks", "if not answer.done() and answer.set_running_or_notify_cancel():", "if answer.set_running_or_notify_cancel():"),
    Slip("text.constraint", "self._stuck = bool(self._matcher.failure) or not masks[0].any()", "self._stuck = bool(self._matcher.failure)"),
    Slip("engine.flights", "self._with_room(at_worst=True)", "proposal"),
    Slip("sched.planner", "if not at_worst and (suspected", "if (suspected"),
    Slip("sched.planner", "if at_worst and (suspected", "if False and (suspected"),
    Slip("engine.flights", "turn.constraint is not None and turn.constraint.slow]", "turn.constraint is not None and turn.constraint.ready]"),
    Slip("engine.flights", "            for masks in flight.plan.masks:\n                give_up(masks.allowed)", "            pass"),
    Slip("sched.settle", "                settled.stuck.append(turn)\n                return", "                settled.stuck.append(turn)\n                break"),
)  # fmt: skip

THINNING = (
    Slip("memory.checkpoints.thinning", "below.reach = max(below.reach, checkpoint.reach)", "below.reach = below.reach"),
    Slip("memory.checkpoints.thinning", "below.reached = max(below.reached, checkpoint.reached)", "below.reached = below.reached"),
    Slip("memory.checkpoints.thinning", "                self._enter(below)  # its gap has shrunk", "                pass"),
    Slip("memory.checkpoints.thinning", "checkpoint.needed_at = self._now", "pass"),
    Slip("memory.checkpoints.thinning", "if since == self._since(checkpoint) and place == self._class(checkpoint):", "if place == self._class(checkpoint):"),
    Slip("memory.checkpoints.thinning", "self.gap(head) / (self.age(head) + 1)", "self.age(head) / (self.gap(head) + 1)"),
    Slip("memory.checkpoints.cache", "self.distinct -= int((self._counts[index] == 0).sum())", "self.distinct -= len(index)"),
    Slip("memory.checkpoints.cache", "        self.wanted.clear()\n", ""),
    Slip("memory.checkpoints.cache", "                self.order.put_back(checkpoint)\n", "                pass\n"),
)  # fmt: skip

GATHERING = (
    Slip("engine.thread.gathering", "if now < self._expected[session][0] + EXPECTED_SECONDS:", "if now < self._expected[session][0]:"),
    Slip("engine.thread.gathering", "self._deadline = now + MOST_SECONDS", "self._deadline = now + 60 * MOST_SECONDS"),
    Slip("engine.thread.gathering", "        if left <= 0:\n            self._deadline = None", "        if left < 0:\n            self._deadline = None"),
    Slip("engine.thread.gathering", "self._expected.pop(turn.session, None)", "self._expected.get(turn.session)"),
    Slip("engine.thread.gathering", "            self._expected.pop(change.session, None)\n            if", "            if"),
    Slip("engine.thread.gathering", "            self._last = now\n\n    def seconds", "\n    def seconds"),
    Slip("engine.thread.gathering", "            self._awaited.clear()\n", ""),
    Slip("engine.thread.gathering", "            self._run += only_begins\n", ""),
    Slip("engine.thread.gathering", "self._run += only_begins", "self._run += 1"),
    Slip("engine.thread.gathering", "if only_begins and any(", "if any("),
)  # fmt: skip

TIMERS = (
    Slip("engine.timers", "self._heap[0][0] <= now:", "self._heap[0][0] < now:"),
    Slip("engine.timers", "and turn.number == number\n            and (timer is not", "and (timer is not"),
    Slip("engine.timers", "if turn is not None and turn.number == number and self._is_due(turn, timer, now):", "if turn is not None and self._is_due(turn, timer, now):"),
    Slip("engine.timers", "when >= turn.changed + self._draft_timeout", "when > turn.changed + self._draft_timeout"),
    Slip("engine.timers", "return drafting and turn.changed + self._draft_timeout <= now", "return turn.changed + self._draft_timeout <= now"),
    Slip("session.registry", "idle = min(idle, max(0.0, policy.ttl - GRACE_SECONDS))", "pass"),
    Slip("session.registry", "self._clock.now() - max(0.0, idle), system)", "self._clock.now(), system)"),
    Slip("session.registry", "                self._resting.append(session)\n            self.watch(session)\n", "                self._resting.append(session)\n"),
    Slip("session.registry", "                session.rests = True\n", ""),
)  # fmt: skip

PRESSURE = (
    Slip("sched.pressure", "if session.has_running_turn or (memory.computed == 0 and memory.turn is None):", "if session.has_running_turn or memory.computed == 0:"),
    Slip("sched.pressure", "if checkpoint.pins == pins:", "if checkpoint.pins >= pins:"),
    Slip("sched.pressure", "masks.append((held > 0) & (held == np.frombuffer(pool.counts, np.int32)))", "masks.append(held > 0)"),
    Slip("sched.pressure", "if n > pools[g].free + pools[g].limbo]", "if n > pools[g].free]"),
    Slip("sched.pressure", "        if self._drop_one(short, set(), Rung.PREFIX):\n            return True\n", ""),
    Slip("sched.pressure", "if self._unused(short) > unused or", "if self._unused(short) >= unused or"),
    Slip("sched.pressure", "if (lacking.alone > self.room_beside([turn])).any():", "if (lacking.alone > self.room_beside(())).any():"),
    Slip("memory.session_memory", "if needed is None or needed.references > 1:", "if needed is None:"),
    Slip("sched.admission", "return running.priority < turn.priority and turn.rank(aging) < running.rank(aging)", "return running.priority < turn.priority"),
    Slip("sched.admission", "lambda: self._need(turn) + self._pledged(turn, later=not turn.drafting),", "lambda: self._need(turn),"),
)  # fmt: skip

SAVES = (
    Slip("memory.tiers.saves", "            save.void = True\n", "            pass\n"),
    Slip("memory.tiers.saves", "        return min(whole, record.position // self._page_size) if all(self._lasting) else whole", "        return whole"),
    Slip("memory.tiers.saves", "else 0, *reached])", "else 0])"),
    Slip("memory.tiers.runs", "max(0, min(map(len, places)) - 1)", "max(0, min(map(len, places)))"),
    Slip("memory.tiers.saves", "            units[stay:] = new\n            self._tiers.copies.release(old)\n", "            units[stay:] = new\n"),
    Slip("memory.tiers.saves", "                self._changes = {**changes, **self._changes}\n", ""),
    Slip("memory.tiers.saves", "                self._changes[record.key] = Listing(record.key, None)\n", ""),
    Slip("memory.tiers.moves", "            for file in self.files:\n                self._disk.remove(file)\n", ""),
    Slip("memory.tiers.copies", "        if unit.file is not None and unit.data is not None and not unit.hosts and not unit.leaving:", "        if unit.file is not None and unit.data is not None:"),
    Slip("engine.parking", "        self._cut_saved(session, most)\n", ""),
    Slip("engine.parking", "        self._replace(session, None)\n        if not keep_saved:\n            self.saves.forget(session.key)\n", "        self._replace(session, None)\n"),
    Slip("engine.snapshots", "            if after in (After.DONE, After.LATER):\n                del", "            if True:\n                del"),
    Slip("engine.snapshots", "        self._allowed -= self._saves.begin()", "        self._saves.begin()"),
    Slip("engine.snapshots", "(self.pause if session.turn is None else self.delay)", "self.pause"),
    Slip("engine.snapshots", " or session.last_turn_end + ttl > now + EXPIRES_SOON", " or True"),
    Slip("engine.snapshots", "self._gather(now, min(self._busy, TOGETHER))", "self._gather(now, 1)"),
    Slip("engine.snapshots", "        if sessions and (", "        if False and ("),
    Slip("engine.snapshots", "        if any(unit.leaving for unit in chain(*units)):", "        if False:"),
    Slip("engine.snapshots", "            if after is After.LATER:\n                unsaved[session] = since\n", "            if False:\n                pass\n"),
    Slip("memory.tiers.saves", "fresh = self._gathered | dict.fromkeys(", "fresh = dict.fromkeys("),
    Slip("memory.tiers.saves", "        record.pinned, pinned = True, record.pinned\n", "        pinned = record.pinned\n"),
    Slip("memory.tiers.saves", "self._finish(save, failed=bool(write.failure))", "self._finish(save, failed=False)"),
    Slip("memory.tiers.saves", "lambda files: [*changes, *(each.listing(files) for each in listings)]", "lambda files: [*(each.listing(files) for each in listings), *changes]"),
    Slip("memory.tiers.contents", "del self._kept[length // SPACING + 1 :]", "del self._kept[length // SPACING + 2 :]"),
    Slip("engine.parking", "wanted = session, session.version, position", "wanted = session, 0, position"),
    Slip("memory.tiers.unit_files", "if at == end or rows[at] != rows[at - 1] + 1:", "if at == end or rows[at] <= rows[at - 1]:"),
    Slip("memory.tiers.file_writes", "                left[0] = left[0][written:]\n", "                pass\n"),
    Slip("memory.tiers.file_writes", "            self._write(file, whole, filled)\n", ""),
    Slip("memory.tiers.file_writes", "begin += os.write(file, self._room[begin:end].data)", "begin += len(self._room[begin:end]) * bool(os.write(file, self._room[begin:end].data))"),
    Slip("memory.tiers.victims", "and gone[unit] == unit.references)", ")"),
    Slip("memory.tiers.victims", "for file in chain(last, record.unread):", "for file in last:"),
    Slip("memory.tiers.victims", "return [each for each in chosen if not removed.isdisjoint(_files(each))]", "return chosen"),
    Slip("memory.tiers.victims", "        if gone.total() > LOOKED_AT:\n            return chosen\n", ""),
)  # fmt: skip
"""Slips of the state that is saved for the next process."""

MOVES = (
    Slip("memory.tiers.moves", "or piece[0].copy.place != target.copy.place):", "or piece[0].copy.group != target.copy.group):"),
    Slip("memory.tiers.moves", "            job.settle()\n", ""),
    Slip("memory.tiers.moves", "            for group, units in _by_group(move.targets).items():\n                self._pools[group].copy_ended(units)", "            pass"),
    Slip("memory.tiers.tiers", "                if stored.move is move:\n                    stored.move = None\n", "                if stored.move is move:\n"),
    Slip("memory.tiers.tiers", "            move.wanted += 1\n", "            move.wanted = 1\n"),
    Slip("memory.tiers.copies", "        unit.place = ELSEWHERE\n", ""),
    Slip("memory.tiers.copies", "        unit.references += 1\n        self._last[unit.group, number] = unit", "        self._last[unit.group, number] = unit"),
    Slip("memory.tiers.copies", "return number if there and (unit.move is None or unit.move.usable) else None", "return number if there else None"),
    Slip("memory.tiers.copies", "        if self._last.get((unit.group, unit.place[0])) is unit:\n            del self._last[unit.group, unit.place[0]]\n        if unit.data is not None:", "        if unit.data is not None:"),
)  # fmt: skip

NATIVE_PAGES = (
    Slip("exec.native_forward", "            wider[:, :width] = self.pages\n", ""),
    Slip("exec.native_forward", "needed = int(changes.index.max()) + 1", "needed = int(changes.index[-1]) + 1"),
    Slip("exec.native_forward", "            table.apply(changes)\n            if count", "            if count"),
    Slip("exec.native_forward", "if count := len(copies.sources):", "if (count := len(copies.sources)) > 1:"),
    Slip("exec.native_forward", "_address(copies.sources), _address(copies.targets)", "_address(copies.targets), _address(copies.sources)"),
    Slip("exec.native_forward", "arrays = moves.reads, moves.writes,", "arrays = moves.writes, moves.writes,"),
    Slip("exec.native_forward", "for unit, copied in zip(units.tolist(), data, strict=True):", "for unit, copied in zip(sorted(units.tolist()), data, strict=True):"),
    Slip("exec.native_forward", "copied: Bytes = self.memory(group)[units]", "copied: Bytes = self.memory(group)[np.sort(units)]"),
)  # fmt: skip

GUESSES = (
    Slip("memory.memory", "rows.kept[row] -= rows.scheduled[row] - position", "rows.kept[row] -= rows.scheduled[row] - position - 1"),
    Slip("memory.memory", "            rows.kept[row] -= rows.scheduled[row] - position\n", "            pass\n"),
    Slip("memory.memory", "self.rows.kept[rows] = uncertain", "self.rows.kept[rows] = np.maximum(uncertain, self.rows.kept[rows])"),
    Slip("memory.kinds.state", "self.rows.scheduled[row] - self.rows.kept[row])", "self.rows.scheduled[row])"),
    Slip("memory.kinds.state", "if self.frozen[row] or self.rows.uncertain[row]:", "if self.frozen[row]:"),
    Slip("memory.kinds.state", "np.where(back, starts - kept, NOWHERE)", "np.where(back, starts, NOWHERE)"),
    Slip("memory.turn_memory", "rows.kept[row] = self._settled, self._scheduled, 0", "rows.kept[row] = self._settled, self._scheduled, rows.kept[row]"),
    Slip("memory.rows", "self.scheduled[rows] - self.kept[rows])", "self.scheduled[rows])"),
    Slip("memory.kinds.sliding", "        self._group.first[row] = 0\n", ""),
    Slip("sched.planner", "uncertain[index] = proposal.counts[index]", "uncertain[index] = proposal.counts[index] - 1"),
    Slip("exec.torch_memory", "inputs[each.ids, : each.count]", "inputs[each.rows, : each.count]"),
    Slip("exec.torch_memory", "self._inputs[group][place, ids, numbers] = inputs[tokens]", "self._inputs[group][place, ids, numbers] = inputs[numbers]"),
    Slip("models.block", "        convolution[memory.keeping], state[memory.keeping] = before\n", ""),
    Slip("sched.settle", "while accepted < len(guesses) and guesses[accepted] == sampled[accepted]:", "while accepted < len(guesses):"),
    Slip("sched.planner", "if added.tokens and all(n <= have", "if added.tokens or all(n <= have"),
    Slip("sched.batch", "self.speculates[row] = turn.params.speculate", "self.speculates[row] = True"),
    Slip("engine.flights", "return self.land() if any(flight.decides_the_next for flight in self._flights) else []", "return []"),
    Slip("sched.suffix_proposer", "self._said.get(turn.session.policy.tenant)", "next(iter(self._said.values()), None)"),
)  # fmt: skip
"""A rejected guess becomes output, or its page is not there; turns that want no guesses get some; rows run ahead of
those with guesses; what a tenant's sessions said is guessed for another. An input of a rejected guess is absorbed, or one twice; a state is kept where it does not stand; a row absorbs the
inputs of its former turn, or those of another row."""

HEADS = (
    Slip("sched.predictor", "turn.tokens(end, end + 1)[0]", "turn.tokens(end - 1, end)[0]"),
    Slip("sched.predictor", "self._batch.rows.limit[chosen] - ends - 1, self._most", "self._batch.rows.limit[chosen] - ends + 1, self._most"),
    Slip("sched.predictor", "(samples > 0) & self._batch.speculates[chosen] & (limits > 0)", "(samples > 0) & (limits > 0)"),
    Slip("sched.predictor", "(asked & live).nonzero()", "asked.nonzero()"),
    Slip("engine.engine", "        progressed, planned = self._flights.land_guesses(), None\n        self._lifecycle.join()\n", "        self._lifecycle.join()\n        progressed, planned = self._flights.land_guesses(), None\n"),
)  # fmt: skip
"""The head for multi-token prediction is told a wrong token, is asked for guesses without a use or of turns that want none,
or its guesses go to another turn. A turn begins before it has looked for memory."""

DRAFTS = (
    Slip("sched.draft_tables", "lease.truncate(kept)", "lease.truncate(kept + 1)"),
    Slip("sched.draft_tables", "        self.sent = min(self.sent, kept)\n", ""),
    Slip("sched.draft_tables", "if length % size and any(", "if False and any("),
    Slip("sched.draft_tables", "        pages = tokens // size\n", "        pages = -(-tokens // size)\n"),
    Slip("sched.draft_tables", "if each.scope == table.scope)", "if True)"),
    Slip("sched.draft_tables", "            self._used[table] = None\n            self._used.move_to_end", "            self._used.move_to_end"),
    Slip("sched.draft_tables", "table.share(best[2], best[0])\n            self._used[table] = None", "table.share(best[2], best[0])"),
    Slip("sched.draft_tables", "self._free_rows.pop(), 0, None", "self._free_rows.pop(), 0, table.sampling"),
    Slip("sched.draft_tables", "self._free_rows.pop(), 0, None", "self._free_rows.pop(), table.sent, None"),
    Slip("sched.draft_tables", "            self._used.move_to_end(table)\n", ""),
    Slip("sched.draft_tables", "if len(kept) + more > self", "if more > self"),
    Slip("sched.draft_tables", "            table.sent, table.sampling = 0, None\n", "            pass\n"),
    Slip("sched.draft_tables", "        self._used.pop(table, None)\n", "        self._used.pop(table, None)\n        self._used.popitem() if self._used else None\n"),
    Slip("sched.draft_proposer", "followed.guesses = guesses[len(new) :] if right == len(new) else array(\"i\")", "followed.guesses = guesses[len(new) :]"),
    Slip("sched.draft_proposer", "tries.note(right, tried, 64)", "tries.note(tried, tried, 64)"),
    Slip("sched.draft_proposer", "checked = min(followed.checked, len(table.tokens))", "checked = len(table.tokens)"),
    Slip("sched.draft_proposer", "followed.checked = min(len(table.tokens), length)", "followed.checked = len(table.tokens)"),
    Slip("sched.draft_proposer", "guesses = each.followed.guesses[: min(count, each.limit)]", "guesses = each.followed.guesses"),
    Slip("sched.draft_proposer", "if token is not None and self._model", "if token is None or self._model"),
    Slip("engine.auditor", "            yield from self._proposer.holders()\n", "            yield from ()\n"),
)  # fmt: skip
"""A page of the draft model has no holder, or several write it; it is shared with another tenant; the model goes on from
tokens that are not the turn's, or guesses with the options of another turn."""

REPLACEMENTS = (
    Slip("session.session", "source.memory.resumable(last) > self.memory.resumable(min(kept, last))", "source.memory.resumable(last) < self.memory.resumable(min(kept, last))"),
    Slip("session.session", "            self.memory.truncate(min(kept, last))\n", "            self.memory.truncate(last)\n"),
    Slip("session.session", "            self.memory.drop()\n            source.memory.fork(self.memory, last)\n", "            source.memory.fork(self.memory, last)\n"),
    Slip("session.session", "self._set_records(self.records[:same] + source.records[same:])\n        self.version += 1\n        self.digests.cut(kept)\n", "self._set_records(self.records[:same] + source.records[same:])\n        self.version += 1\n"),
    Slip("session.session", "self._set_records(self.records[:same] + source.records[same:])", "self._set_records(source.records)"),
    Slip("engine.lifecycle", 'self.note("replace", session, kept=kept, same=same)', 'self.note("replace", session, kept=kept)'),
    Slip("engine.lifecycle", "        self.sharing.index.changed(session, kept)\n        self.note(\"replace\"", "        self.note(\"replace\""),
    Slip("engine.session_operations", "if session.scope != source.scope:", "if False:"),
    Slip("engine.session_operations", "        self._gate.allowed(session, len(source.history), 0)\n", ""),
)  # fmt: skip
"""A session that takes over another keeps units, names or index entries of other tokens, shares its records, or lets the
journal miss some; or takes over one with another adapter, or one that is too long."""

EXPECTATIONS = (
    Slip("engine.expectations", "not _is_idle(session) or session.version != coming.version or ", "not _is_idle(session) or "),
    Slip("engine.expectations", "        for lease in coming.leases:\n            lease.release()\n", ""),
    Slip("engine.expectations", "        return [lease for each in self._coming.values() for lease in each.leases]\n", "        return []\n"),
    Slip("engine.expectations", "memory.lacking(session, position) + pledged, rest", "memory.lacking(session, position), rest"),
    Slip("engine.expectations", "            if failures:\n", "            if False:\n"),
    Slip("engine.expectations", "        if memory.restorable(session, last) != position:\n", "        if False:\n"),
    Slip("engine.expectations", "            if not self._begin(session, admission):\n", "            if self._begin(session, admission):\n"),
    Slip("engine.lifecycle", "        self._idle_memory.forget(session)\n        self.expectations.forget(session)\n", "        self._idle_memory.forget(session)\n"),
    Slip("engine.lifecycle", "        self.expectations.met(turn.session)\n", ""),
    Slip("engine.lifecycle", "if why in PARKS:", 'if why == "pressure":'),
    Slip("engine.erasure", "        self._lifecycle.expectations.withdraw_all()\n", ""),
    Slip("sched.pressure", "and (self._withdraw() or self._drop_one", "and (self._drop_one"),
)  # fmt: skip
"""State that comes back early reaches a session that has changed or whose turn has begun, before it has arrived, or
although it failed; its units are lost, or taken from turns to which they were promised; or it never comes."""

ARRIVALS = (
    Slip("engine.arrivals", "        if arrival.waits:\n            self._registry.free_place", "        if not arrival.waits:\n            self._registry.free_place"),
    Slip("session.registry", "            self.pins.require(self.limit(policy))\n            self.pins.add(self.limit(policy))\n", "            pass\n"),
    Slip("engine.arrivals", "        if arrival.complete:\n", "        if False:\n"),
    Slip("engine.arrivals", "adapter is not None and adapter.digest == digest for", "False for"),
    Slip("models.native.program", "        if scales is None:\n", "        if True:\n"),
)  # fmt: skip
"""What it takes to open a session that moves is given to others before it is there; or kept keys are read with other
scales."""

BY_AREA = {
    "arrivals": ARRIVALS,
    "holes": HOLES,
    "maps": MAPS,
    "grammars": GRAMMARS,
    "thinning": THINNING,
    "gathering": GATHERING,
    "timers": TIMERS,
    "pressure": PRESSURE,
    "moves": MOVES,
    "saves": SAVES,
    "native pages": NATIVE_PAGES,
    "guesses": GUESSES,
    "replacements": REPLACEMENTS,
    "drafts": DRAFTS,
    "heads": HEADS,
    "erasing": ERASING,
    "expectations": EXPECTATIONS,
}
