"""Operations on turns, which begin and end them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import count

from tenuto.base.errors import IllegalTransition, InvalidRequest
from tenuto.base.options import TurnParams
from tenuto.base.turns import EndReason, Keep, TurnState, check_keep
from tenuto.base.wire.document import Conversation
from tenuto.base.wire.moves import MovedTurn
from tenuto.engine.core import Core
from tenuto.engine.gate import TurnGate
from tenuto.engine.guard import guarded
from tenuto.engine.lifecycle import Lifecycle
from tenuto.engine.moved_turns import Readied
from tenuto.engine.occupation import Occupation
from tenuto.session.pool import Pool
from tenuto.session.results import Once
from tenuto.session.session import Session
from tenuto.session.turn import Turn
from tenuto.text.constraint import Constraint


class TurnOperations:
    """Operations on the open turn of a session, which is found as in `SessionOperations`."""

    def __init__(self, core: Core, lifecycle: Lifecycle, occupation: Occupation, gate: TurnGate) -> None:
        self.fuse = core.fuse
        self._registry = core.registry
        self._lifecycle = lifecycle
        self._occupation = occupation
        self._gate = gate
        self._counts = core.counts
        self._clock = core.clock
        self._memory = core.memory
        self._numbers = count(1)

    @guarded
    def submit(
        self,
        session_id: str,
        tokens: Iterable[int] = (),
        params: TurnParams | None = None,
        conversation: Conversation | None = None,
        constraint: Constraint | None = None,
        *,
        tenant: str = "",
        once: Once | None = None,
        prediction: array[int] | None = None,
    ) -> Turn:
        """Opens a turn that appends `tokens` and generates, or with `max_new_tokens` 0 commits the tokens once they are
        computed. `conversation`: the conversation up to the end of `tokens`. `constraint`: that of the grammar and the
        bad words of `params`, made for this turn. `once`: its idempotency key. `prediction`: tokens that the output may
        repeat. An open draft becomes this turn and keeps its computed prefix of `tokens`. Raises `SessionBusy`,
        `ContextExceeded`, `InvalidRequest` or `Overloaded`, having changed nothing."""
        checked, params = self._gate.read(tokens), params or TurnParams()
        self._occupation.require_memory()
        session = self._registry.get(session_id, tenant)
        session.require_open()
        draft = session.turn if session.turn is not None and session.turn.drafting else None
        if draft is None:
            session.require_idle("start a turn on")
        else:
            params.require_plain("a turn that was a draft")
        if params.pooling is not None and not checked:
            raise InvalidRequest("the input is empty; allowed with pooling: at least one token", param="input")
        allowed = self._gate.allowed(session, len(session.history) + len(checked), params.max_new_tokens)
        adapter, text = self._gate.adapter(session), self._gate.admit(params, constraint)
        turn = draft or Turn(next(self._numbers), session, len(session.history), params, self._clock.now(), adapter)
        if draft is not None:
            self._lifecycle.redraft(draft, checked)
            draft.submit(params, self._clock.now())
        else:
            turn.input = checked
        if params.pooling is not None:
            turn.pool = Pool(params.pooling, turn.base_length, turn.prompt_length)
        turn.conversation = conversation
        turn.max_new_tokens, turn.text, turn.constraint = allowed, text, constraint
        turn.prediction = prediction or turn.prediction
        self._keep_output(turn, once)
        self._lifecycle.enqueue(turn, "submit draft" if draft is not None else "submit")
        return turn

    @guarded
    def regenerate(
        self,
        session_id: str,
        params: TurnParams | None = None,
        constraint: Constraint | None = None,
        *,
        tenant: str = "",
        once: Once | None = None,
        prediction: array[int] | None = None,
    ) -> Turn:
        """Opens a turn that generates the last turn's output again. The old output stays until this turn commits.
        `constraint`, `once`, `prediction`: see `submit`."""
        self._occupation.require_memory()
        session = self._registry.get(session_id, tenant)
        session.require_idle("regenerate in")
        params = params or TurnParams()
        record = session.regenerated_turn()
        params.require_plain("regenerate, which has no input")
        if not params.generates:
            raise InvalidRequest("regenerate has max_new_tokens 0; allowed: at least 1")
        allowed = self._gate.allowed(session, record.input_end, params.max_new_tokens)
        adapter, text = self._gate.adapter(session), self._gate.admit(params, constraint)
        turn = Turn(next(self._numbers), session, record.input_end, params, self._clock.now(), adapter)
        turn.replaces, turn.conversation = True, record.conversation
        turn.max_new_tokens, turn.text, turn.constraint = allowed, text, constraint
        turn.prediction = prediction or turn.prediction
        self._keep_output(turn, once)
        self._lifecycle.enqueue(turn, "regenerate")
        return turn

    def ready(self, moved: MovedTurn, constraint: Constraint | None) -> Readied:
        """Readies a turn of another engine to go on here. `constraint`: a new one, as in `submit`. Any thread may call
        this. Raises what `submit` raises for its options, and `GrammarFailed`."""
        return Readied.of(moved, self._gate.admit(moved.params, constraint), constraint)

    @guarded
    def go_on(self, session: Session, readied: Readied, position: int) -> Turn:
        """Opens a turn of another engine, with its output so far, on its session, which was just restored. `position`:
        the number of its tokens whose state the session's memory has. It is never refused because others wait. Raises
        `AdapterNotLoaded`."""
        session.require_idle("continue a turn of")
        moved, adapter = readied.moved, self._gate.adapter(session)
        turn = Turn(next(self._numbers), session, moved.base_length, moved.params, self._clock.now(), adapter)
        readied.fill(turn, self._clock.now(), self._memory.weights.name)
        turn.moved = position
        session.turn = turn
        self._counts.note("go on")
        self._lifecycle.go_on(turn)
        return turn

    @guarded
    def record(self, turn: Turn, request: bytes) -> None:
        """Has the journal keep the request of a turn that was just submitted, until the turn ends."""
        self._lifecycle.record(turn, request)

    @staticmethod
    def _keep_output(turn: Turn, once: Once | None) -> None:
        """Sets the turn's idempotency key; its whole text is then kept for the result."""
        turn.once = once
        if once is not None and turn.text is not None:
            turn.text.keep_text()

    @guarded
    def draft(self, session_id: str, tokens: Iterable[int], *, tenant: str = "") -> Turn:
        """Sets the draft to `tokens`, which are the whole draft so far. Only changed tokens are computed, except the
        last one. The draft joins the history only through `submit`; it times out `draft_timeout` seconds after its last
        change."""
        checked = self._gate.read(tokens)
        self._occupation.require_memory()
        session = self._registry.get(session_id, tenant)
        session.require_open()
        turn = session.turn
        if turn is not None and not turn.drafting:
            session.require_idle("draft in")
        self._gate.allowed(session, len(session.history) + len(checked), 0)
        adapter = self._gate.adapter(session)
        if turn is None:
            turn = Turn(next(self._numbers), session, len(session.history), TurnParams(), self._clock.now(), adapter)
            turn.state = TurnState.DRAFTING
            session.turn = turn
            turn.input = checked
            self._registry.note_turn(session)
            self._counts.note("draft")
        else:
            self._lifecycle.redraft(turn, checked)
            self._counts.note("redraft")
        self._lifecycle.queue_draft(turn)
        return turn

    @guarded
    def abort(self, session_id: str, keep: Keep = None, *, tenant: str = "") -> Turn:
        """Ends the open turn now. `keep` `None` rolls it back; otherwise its input and the output that `keep` selects
        are committed (a barge-in), unless the turn never ran. Raises `IllegalTransition` if no turn is open."""
        session = self._registry.get(session_id, tenant)
        turn = session.turn
        if turn is None:
            raise IllegalTransition(f"session {session_id} has no open turn to abort")
        if check_keep(keep) is None or not turn.started:
            self._lifecycle.abort(turn, EndReason.ABORT)
        else:
            kept = {"delivered": turn.delivered, "all": None}[keep] if isinstance(keep, str) else keep
            self._lifecycle.commit(turn, EndReason.ABORT, kept)
        return turn
