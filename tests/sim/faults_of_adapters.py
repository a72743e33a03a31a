"""Planted faults of adapters: state that one adapter computed is read under another. See `faults`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tenuto.base.options import Policy, Scope
from tenuto.engine.adapter_operations import AdapterOperations
from tenuto.engine.session_operations import SessionOperations
from tenuto.memory.tiers import contents
from tenuto.sched.planner import Planner
from tenuto.session import prefixes
from tenuto.session.adapters import Adapters
from tenuto.session.prefixes import PrefixIndex
from tenuto.session.session import Session
from tests.sim.faults import replaced, together


def the_prefix_index_ignores_the_adapter() -> Any:
    """Sessions of a tenant share prefixes whatever adapter computed them."""

    def scope(self: Session) -> Scope:
        return Scope(self.policy.tenant)

    def alone(original: Any) -> Any:
        def do(*args: Any) -> Any:
            with replaced(Session, "scope", lambda _: property(scope)):
                return original(*args)

        return do

    return together(replaced(PrefixIndex, "_follow", alone), replaced(prefixes, "_others", _any_of_the_tenant))


def _any_of_the_tenant(_: Any) -> Any:
    def others(owners: dict[Session, None], session: Session) -> Any:
        tenant = session.policy.tenant
        return (owner for owner in owners if owner is not session and owner.policy.tenant == tenant)

    return others


def contents_of_tiers_ignore_the_adapter() -> Any:
    """A parked unit stands for its tokens under every adapter, and a session is given such a unit of another."""

    def make(original: Any) -> Any:
        def begun(scope: Scope) -> Any:
            return original(Scope(scope.tenant))

        return begun

    return replaced(contents, "_begun", make)


def a_fork_loses_its_adapter() -> Any:
    """The child is opened with the model alone."""

    def make(original: Any) -> Any:
        def opened(self: SessionOperations, session_id: Any = None, policy: Any = None, system: Any = None) -> Session:
            forked = policy is not None and policy.adapter is not None and policy.adapter.digest and session_id is None
            return original(self, session_id, replace(policy, adapter=None) if forked else policy, system)

        return opened

    return replaced(SessionOperations, "open", make)


def a_restored_session_loses_its_adapter() -> Any:
    """A session from the journal goes on with the model alone."""

    def make(original: Any) -> Any:
        def restore(self: SessionOperations, saved: Any, **options: Any) -> Session:
            return original(self, replace(saved, policy=replace(saved.policy, adapter=None)), **options)

        return restore

    return replaced(SessionOperations, "restore", make)


def an_adapter_is_known_by_its_name() -> Any:
    """A session goes on with whatever weights have the name of its adapter now."""

    def make(original: Any) -> Any:
        def slot(self: Adapters, session: str, policy: Policy) -> int:
            if policy.adapter is not None and policy.adapter.name in self._named:
                policy = policy.with_adapter(replace(policy.adapter, digest=self._named[policy.adapter.name].digest))
            return original(self, session, policy)

        return slot

    return replaced(Adapters, "slot", make)


def adapters_of_rows_are_not_in_the_plan() -> Any:
    """All rows are computed with the model alone."""
    return replaced(Planner, "_adapters", lambda original: lambda self, chosen: None)


def an_adapter_is_unloaded_under_an_open_turn() -> Any:
    """Open turns do not keep their adapter loaded."""

    def make(original: Any) -> Any:
        def unload(self: AdapterOperations, name: str) -> Any:
            sessions, self._sessions = self._sessions, ()  # type: ignore[assignment]
            try:
                return original(self, name)
            finally:
                self._sessions = sessions

        return unload

    return replaced(AdapterOperations, "unload", make)


FAULTS_OF_ADAPTERS = (
    the_prefix_index_ignores_the_adapter,
    contents_of_tiers_ignore_the_adapter,
    a_fork_loses_its_adapter,
    a_restored_session_loses_its_adapter,
    an_adapter_is_known_by_its_name,
    adapters_of_rows_are_not_in_the_plan,
    an_adapter_is_unloaded_under_an_open_turn,
)
