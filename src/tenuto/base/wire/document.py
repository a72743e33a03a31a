"""Sessions as files of JSON, which another server of the same model can import."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from tenuto.base.checks import MAX_COUNT, whole, wrong
from tenuto.base.errors import InvalidRequest
from tenuto.base.options import Policy, SessionAdapter
from tenuto.base.turns import Message
from tenuto.base.views import View

FORMAT = "tenuto-session-1"
"""Name of the format. Servers with later formats also read this one."""


class Conversation(View, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The facts about the messages in a history that rendering needs. Its size does not grow with the history.

    The history ends with the last message's content. The markup that closes that message is not in it yet, except for
    the end-of-turn token if the model wrote it. `system`: whether the messages begin with a system message; `dialogue`:
    whether there are others; `role`: that of the last message, or of the answer being written; `tools`: a digest of the
    tools in its opening, "" if there were none.
    """

    system: bool
    dialogue: bool
    role: str
    tools: str = ""

    def then(self, messages: Sequence[Message], generate: bool) -> Conversation:
        """Returns the conversation with `messages` appended, and with `generate` also the assistant's answer."""
        roles = [message.role for message in messages] + ["assistant"] * generate
        return replace(self, dialogue=self.dialogue or set(roles) != {"system"}, role=roles[-1])


class SavedTurn(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A committed turn, as token ids. `conversation`: `None` if it does not consist of messages. `cut`: whether the
    history was cut inside its input."""

    input: list[int]
    output: list[int]
    conversation: Conversation | None = None
    cut: bool = False


class SavedAdapter(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapter of a session; see `SessionAdapter`."""

    name: str
    digest: str


class SessionDocument(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole session except its memory, which is computed again.

    `model`: a fingerprint of the model's vocabulary. `sha256`: the checksum of all other fields, in hexadecimal.
    `adapter`: unset without one, so that files from before there were adapters keep their checksums."""

    format: str = FORMAT
    model: str = ""
    id: str
    system: str | None
    version: int
    priority: int
    ttl: float | None
    max_tokens: int | None
    metadata: dict[str, str]
    turns: list[SavedTurn]
    adapter: SavedAdapter | msgspec.UnsetType = msgspec.UNSET
    sha256: str = ""

    @property
    def tokens(self) -> int:
        """The number of tokens in its turns."""
        return sum(len(turn.input) + len(turn.output) for turn in self.turns)

    def policy(self, tenant: str = "") -> Policy:
        """Returns the session's policy, with `tenant` as its owner. Raises `InvalidRequest`."""
        metadata = tuple(self.metadata.items())
        saved = self.adapter
        adapter = SessionAdapter(saved.name, saved.digest) if isinstance(saved, SavedAdapter) else None
        return Policy(self.priority, self.ttl, self.max_tokens, tenant=tenant, metadata=metadata, adapter=adapter)

    def signed(self, model: str) -> SessionDocument:
        """Returns a copy with the fingerprint of its model and the checksum."""
        complete = replace(self, model=model)
        return replace(complete, sha256=_digest(complete))

    def check(self, model: str) -> None:
        """Raises `InvalidRequest` unless it is undamaged and belongs to the model with this fingerprint."""
        if self.format != FORMAT:
            raise wrong("the session's format", self.format, repr(FORMAT), param="format")
        if self.sha256 != _digest(self):
            raise InvalidRequest("the session is damaged: its sha256 does not match; export it again", param="sha256")
        if self.model != model:
            raise InvalidRequest(
                "the session is of a model with another vocabulary; allowed: a session of this model", param="model"
            )
        whole("version", self.version, 0, MAX_COUNT)
        if not all(turn.input or turn.output for turn in self.turns):
            raise InvalidRequest("the session has a turn without tokens", param="turns")


def _digest(document: SessionDocument) -> str:
    """Returns a checksum of the fields. It does not depend on white space or the order of keys in the document."""
    rest = replace(document, sha256="")
    return hashlib.sha256(msgspec.json.encode(rest, order="deterministic")).hexdigest()


def read_document(data: bytes | str) -> SessionDocument:
    """Decodes a document. Raises `InvalidRequest`."""
    try:
        found = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        given = msgspec.json.decode(found.get("format", b"null"))
        if given == FORMAT:
            return msgspec.json.decode(data, type=SessionDocument)
    except (msgspec.MsgspecError, UnicodeError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"this is not an exported session: {error}") from None
    raise wrong("the session's format", given, repr(FORMAT), param="format")
