"""The adapters that are loaded: their names, and the slots of their weights."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from tenuto.base.checks import check_unicode, wrong
from tenuto.base.errors import AdapterNotLoaded, AlreadyExists, IllegalTransition, ModelNotFound, NotFound, Overloaded
from tenuto.base.options import Policy, SessionAdapter
from tenuto.base.views import AdapterView

MAX_ADAPTERS = 1024
MAX_NAME_LENGTH = 128


class Adapters:
    """The adapters of an engine. The digest of an adapter's weights identifies its results. A name may later stand for
    other weights, and several names for the same weights.

    Invariant: `_slots` has exactly the digests of the adapters in `_named`, each with a separate slot, counted from 1.
    """

    def __init__(self) -> None:
        self._named: dict[str, AdapterView] = {}
        self._slots: dict[str, int] = {}

    def __iter__(self) -> Iterator[AdapterView]:
        return iter(self._named.values())

    def check_new(self, name: str) -> None:
        """Raises `InvalidRequest`, `AlreadyExists` or `Overloaded` unless an adapter of this name can be added."""
        if type(name) is not str or not name.isprintable() or not 0 < len(name) <= MAX_NAME_LENGTH:
            raise wrong("lora_name", name, f"1 to {MAX_NAME_LENGTH} printable characters")
        check_unicode("lora_name", name)
        if name in self._named:
            raise AlreadyExists(f"the adapter {name!r} is loaded already; unload it first", param="lora_name")
        if len(self._named) >= MAX_ADAPTERS:
            raise Overloaded(f"{MAX_ADAPTERS} adapters are loaded, the most allowed; unload some first")

    def add(self, adapter: AdapterView) -> int | None:
        """Adds an adapter that `check_new` accepts. Returns the slot for its weights; `None` if they have one."""
        self._named[adapter.name] = adapter
        if adapter.digest in self._slots:
            return None
        slot = self._slots[adapter.digest] = next(n for n in count(1) if n not in self._slots.values())
        return slot

    def get(self, name: str) -> AdapterView:
        """Returns the adapter of this name. Raises `NotFound`."""
        if name not in self._named:
            raise NotFound(f"there is no adapter {name!r}; {self._known()}", param="lora_name")
        return self._named[name]

    def is_last(self, adapter: AdapterView) -> bool:
        """Whether no other name stands for the adapter's weights."""
        return sum(other.digest == adapter.digest for other in self) == 1

    def remove(self, adapter: AdapterView) -> int | None:
        """Removes an adapter. Returns the slot of its weights if no other name stands for them, otherwise `None`."""
        last = self.is_last(adapter)
        del self._named[adapter.name]
        return self._slots.pop(adapter.digest) if last else None

    def resolve(self, policy: Policy) -> Policy:
        """Returns the policy of a new session with the digest of the adapter that it names. Raises `ModelNotFound`."""
        asked = policy.adapter
        if asked is None or asked.digest:
            return policy
        if asked.name not in self._named:
            raise ModelNotFound(f"there is no adapter {asked.name!r}; {self._known()}", param="model")
        return policy.with_adapter(SessionAdapter(asked.name, self._named[asked.name].digest))

    def check_same(self, session: str, policy: Policy, given: str) -> None:
        """Raises `IllegalTransition` unless the weights that have the name `given`, empty for no adapter, are those of
        the session's adapter. While these are not loaded, the session's own name is accepted: `slot` says more."""
        wanted, named = policy.adapter, self._named.get(given)
        own = wanted.name if wanted is not None else ""
        if wanted is None or named is None or wanted.digest not in self._slots:
            same = given == own
        else:
            same = named.digest == wanted.digest
        if not same:
            asked = f"the adapter {given!r}" if given else "the model without one"
            other = ", which has other weights by now" if given == own else ""
            raise IllegalTransition(
                f"session {session} has {f'the adapter {own!r}' if own else 'no adapter'}, and the request names "
                f"{asked}{other}; open another session for it",
                param="model",
            )

    def slot(self, session: str, policy: Policy) -> int:
        """Returns the slot of a session's adapter; 0 without one. Raises `AdapterNotLoaded`."""
        wanted = policy.adapter
        if wanted is None:
            return 0
        if wanted.digest in self._slots:
            return self._slots[wanted.digest]
        loaded = self._named.get(wanted.name)
        other = f", and the adapter of that name has other weights ({loaded.digest[:12]})" if loaded is not None else ""
        raise AdapterNotLoaded(
            f"session {session} continues with the adapter {wanted.name!r} ({wanted.digest[:12]}), which is not "
            f"loaded{other}; load its weights, under any name"
        )

    def _known(self) -> str:
        return f"loaded: {', '.join(map(repr, self._named)) or 'none'}"
