"""Loading and unloading of adapters."""

from __future__ import annotations

from tenuto.base.errors import AdapterBusy
from tenuto.base.plan import AdapterWeights
from tenuto.base.views import AdapterView
from tenuto.engine.arrivals import Arrivals
from tenuto.engine.core import Core
from tenuto.engine.guard import guarded
from tenuto.session.session import Session


class AdapterOperations:
    """Loads and unloads adapters between steps.

    An adapter stays loaded as long as a turn with it is open, or a session with it moves here. Idle sessions do not
    keep it: they stay, with their memory, and their next turn is refused until the same weights are loaded again.
    """

    def __init__(self, core: Core, arrivals: Arrivals) -> None:
        self.fuse = core.fuse
        self._arrivals = arrivals
        self._adapters = core.adapters
        self._executor = core.executor
        self._sessions = core.registry

    def check(self, session: Session, given: str | None) -> None:
        """Raises `IllegalTransition` unless `given`, if it is not `None`, names the session's adapter; "": none."""
        if given is not None:
            self._adapters.check_same(session.id, session.policy, given)

    @guarded
    def load(self, name: str, path: str, weights: AdapterWeights, *, replace: bool = False) -> AdapterView:
        """Adds an adapter. With `replace`, it takes the place of the one that has its name, which is unloaded first.
        Raises `AlreadyExists`, `Overloaded` or `InvalidRequest`, and the errors of `unload`."""
        if replace and name in {adapter.name for adapter in self._adapters}:
            self.unload(name)
        self._adapters.check_new(name)
        adapter = AdapterView(name=name, path=path, digest=weights.digest)
        slot = self._adapters.add(adapter)
        if slot is not None:
            self._executor.set_adapter(slot, weights)
        return adapter

    @guarded
    def unload(self, name: str) -> AdapterView:
        """Removes an adapter. Raises `NotFound`, and `AdapterBusy` while turns with its weights are open, or sessions
        with them move here."""
        adapter = self._adapters.get(name)
        if self._adapters.is_last(adapter):
            open_turns = sum(
                session.turn is not None and session.scope.adapter == adapter.digest for session in self._sessions
            )
            if open_turns:
                raise AdapterBusy(
                    f"the number of open turns with the adapter {name!r} is {open_turns}; it can be unloaded once they "
                    "have ended"
                )
            if arriving := self._arrivals.with_adapter(adapter.digest):
                raise AdapterBusy(
                    f"the number of sessions with the adapter {name!r} that move here is {arriving}; it can be "
                    "unloaded once they have arrived"
                )
        slot = self._adapters.remove(adapter)
        if slot is not None:
            self._executor.set_adapter(slot, None)
        return adapter
