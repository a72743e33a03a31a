"""Files with a session and its state: writes them from a running engine and opens sessions from them."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

from tenuto.base.errors import InvalidRequest
from tenuto.base.views import SessionInfo
from tenuto.base.wire.document import SessionDocument
from tenuto.base.wire.messages import ExportSession, GetSession, ImportSession
from tenuto.base.wire.state_file import CopiedState, StateFile, write_state_file
from tenuto.engine.engine import Engine
from tenuto.engine.session_states import SessionStates
from tenuto.engine.thread.dispatcher import Dispatcher
from tenuto.engine.thread.loop import EngineLoop
from tenuto.memory.tiers.lent import LentUnits
from tenuto.runtime.loaded_model import LoadedModel


class SessionFiles:
    """Writes and reads files of sessions outside the engine's thread, one file at a time, so that there is at most one
    copy of a state."""

    def __init__(self, loaded: LoadedModel, loop: EngineLoop, dispatcher: Dispatcher, states: SessionStates) -> None:
        self._loaded = loaded
        self._loop = loop
        self._dispatcher = dispatcher
        self._states = states

    def export(self, request: ExportSession, path: Path) -> SessionDocument:
        """Writes a session and its state to a file, and returns the session. The state is copied between two steps; the
        file is written while steps continue."""

        def take(engine: Engine) -> tuple[SessionDocument, CopiedState | LentUnits]:
            return self._dispatcher.execute(request), engine.states.of(request.session, request.tenant)

        document, state = self._loop.execute(take).result()
        if isinstance(state, LentUnits):
            lent, state = state, state.read()
            self._loop.call(lambda _: self._states.take_back(lent))
        model = self._loaded.model
        signed = document.signed(self._loaded.fingerprint)
        identity, page_size = model.state_fingerprint(), model.executor.spec.page_size
        write_state_file(path, signed, identity, page_size, self._states.unit_bytes, state)
        return signed

    def checked(self, request: ImportSession, path: Path) -> StateFile:
        """Opens the file of a session to import, and checks all of it. Raises `InvalidRequest`."""
        file = StateFile(path)
        with ExitStack() as undo:
            undo.callback(file.close)
            file.check(self._loaded.fingerprint, self._loaded.model.state_fingerprint())
            self._states.check(file)
            file.verify()
            if file.document != request.document:
                raise InvalidRequest("the sessions in the file and in the request differ")
            undo.pop_all()
        return file

    def open(self, engine: Engine, request: ImportSession, file: StateFile) -> SessionInfo:
        """Opens the session with the state in `file`, and closes the file. Runs in the engine's thread."""
        with closing(file):
            session = self._dispatcher.execute(request).session_id
            engine.states.put(session, file, request.tenant)
            return self._dispatcher.execute(GetSession(tenant=request.tenant, session=session))
