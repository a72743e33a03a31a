"""Runs: conversations whose clients resend the whole history. The names that clients send only help to find state: a
request continues a session as far as its messages equal those that the session has committed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b

from starlette.datastructures import Headers

from tenuto.base.turns import Message
from tenuto.base.wire.messages import StartTurn

RUN_HEADERS = (
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "conversation-id",
    "conversation_id",
    "x-session-id",
    "x-session-affinity",
    "x-sgl-routing-key",
    "x-dynamo-session-id",
)
"""Headers with the name of a run, in order of precedence: Claude Code's, Codex's, OpenCode's, and those of routers."""
PARENT_HEADERS = ("x-parent-session-id",)
"""Headers with the name of the run that began this one: OpenCode's. All agents of Claude Code name the same run."""
MAX_BRANCHES = 32
"""Maximum number of a run's sessions."""
UNREPEATABLE = b""
"""Stands in a chain for an answer of which the session has more than its client: no message equals it."""


def run_names(headers: Headers, given: str | None) -> list[bytes]:
    """Returns digests of the names of a request's run and of its parent; empty without a name. `given`: the name in the
    body, used if no header has one."""
    found = next((headers[name] for name in RUN_HEADERS if headers.get(name)), given)
    if not found:
        return []
    parents = [headers[name] for name in PARENT_HEADERS if headers.get(name)]
    return [_digest(name) for name in (found, *parents)]


def _digest(*parts: str | bytes) -> bytes:
    hashed = blake2b(digest_size=16)
    for part in parts:
        raw = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        hashed.update(len(raw).to_bytes(8, "little"))
        hashed.update(raw)
    return hashed.digest()


def chain_of(start: StartTurn, messages: Sequence[Message], kind: str) -> list[bytes]:
    """Returns digests of the beginnings of a conversation, with 0, 1, ... and all of the messages, and of what else
    decides how they are written. `kind`: conversations of different kinds never share a session."""
    chain = [_digest(kind, start.adapter or "", start.tools.source, start.variables.source)]
    for message in messages:
        chain.append(after(chain[-1], message))
    return chain


def after(before: bytes, message: Message) -> bytes:
    """Returns the digest of a conversation that goes on with `message`. Clients may change blanks around an answer, the
    layout of its calls' arguments, and leave out its thoughts: these do not count."""
    answer = message.role == "assistant"
    content = message.content.strip() if answer else message.content
    calls = [part for call in message.tool_calls for part in (call.name, _canonical(call.arguments), call.id)]
    return _digest(before, message.role, content, message.name, message.tool_call_id, *calls)


def _canonical(arguments: str) -> str:
    with suppress(ValueError, RecursionError):
        return json.dumps(json.loads(arguments), sort_keys=True)
    return arguments


@dataclass(slots=True, eq=False)
class Branch:
    """A session of a run. `chain`: digests of its committed messages, as `chain_of` returns them. `ends`: the number of
    messages after each of its turns. `version`: that of the session. `busy`: a turn is open. `owned`: it is closed when
    the run no longer needs it. `tokens`: the length of its history. `continued`: a request has come back to it."""

    run: bytes
    session: str
    chain: list[bytes]
    ends: list[int] = field(default_factory=list)
    version: int = 0
    busy: bool = True
    owned: bool = True
    tokens: int = 0
    continued: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request continues a run: after the first `turns` turns of `branch`, with `messages` messages, or in a new
    session if there is no branch. `reason`: why less than the whole request was found; empty if it continues the
    latest state."""

    branch: Branch | None
    turns: int
    messages: int
    reason: str

    @property
    def at_end(self) -> bool:
        """Whether the branch can go on in place."""
        return self.branch is not None and not self.branch.busy and self.turns == len(self.branch.ends)


class Runs:
    """The runs of a tenant. They exist only in this process.

    Invariant: `_branches` has the branches of each run, the most recently used last; no run is empty.
    """

    def __init__(self) -> None:
        self._branches: dict[bytes, list[Branch]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._branches.values()))

    def find(self, names: Sequence[bytes], chain: Sequence[bytes]) -> Place:
        """Returns the place that leaves the fewest messages of the request to be computed."""
        branches = [branch for name in names for branch in self._branches.get(name, ())]
        best, known = Place(None, 0, 0, ""), -1  # known: the most messages that a branch has in common
        for branch in reversed(branches):
            common = _common(branch.chain, chain)
            known = max(known, common)
            turns = sum(1 for end in branch.ends if end <= min(common, len(chain) - 2))
            place = Place(branch, turns, branch.ends[turns - 1] if turns else 0, "")
            if turns and (place.messages, place.at_end) > (best.messages, best.at_end):
                best = place
        return Place(best.branch, best.turns, best.messages, _reason(branches, best, known, len(chain) - 1))

    def add(self, branch: Branch) -> None:
        """Adds a branch, or marks it as the most recently used."""
        self.forget(branch)
        self._branches.setdefault(branch.run, []).append(branch)

    def forget(self, branch: Branch) -> None:
        """Removes a branch, if it is there."""
        branches = self._branches.get(branch.run, [])
        if branch in branches:
            branches.remove(branch)
            if not branches:
                del self._branches[branch.run]

    def excess(self, run: bytes, sessions: int, tokens: int | None) -> list[Branch]:
        """Removes and returns the branches that are too many: a run's above `MAX_BRANCHES`, and all runs' above so many
        sessions or tokens. Branches that no request has come back to go first, then the least recently used."""
        gone = []
        own = self._branches.get(run, [])
        while len(own) > MAX_BRANCHES and (branch := _least(own)) is not None:
            gone.append(branch)
            self.forget(branch)
        everything = [branch for branches in self._branches.values() for branch in branches]
        held = sum(branch.tokens for branch in everything)
        while len(everything) > sessions or (tokens is not None and held > tokens):
            branch = _least(everything)
            if branch is None:
                break
            everything.remove(branch)
            held -= branch.tokens
            gone.append(branch)
            self.forget(branch)
        return gone


def _least(branches: Iterable[Branch]) -> Branch | None:
    """Returns the branch to give up first; those with an open turn stay."""
    return min((branch for branch in branches if not branch.busy), key=lambda branch: branch.continued, default=None)


def _common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Returns the number of messages that two conversations have in common; -1 if they are written differently."""
    low, high = -1, min(len(one), len(other)) - 1  # digests cover all messages before: those equal come first
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[middle] == other[middle] else (low, middle - 1)
    return low


def _reason(branches: Sequence[Branch], best: Place, known: int, messages: int) -> str:
    """Returns why a request does not continue the latest state of its run."""
    if not branches:
        return "new"
    if known < 0:
        return "tools or options of the template changed"
    if best.branch is not None and best.turns == len(best.branch.ends):
        return ""
    return "sent again" if known >= messages else f"diverged at message {known + 1}"
