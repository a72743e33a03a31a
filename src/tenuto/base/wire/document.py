"""Sessions as files of JSON, which another server of the same model can import."""

from __future__ import annotations

import hashlib

import msgspec

from tenuto.base.checks import MAX_COUNT, whole, wrong
from tenuto.base.errors import InvalidRequest
from tenuto.base.options import Policy
from tenuto.base.views import View

FORMAT = "tenuto-session-1"
"""Name of the format. Servers with later formats also read this one."""


class Standing(View, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A summary of the messages up to a turn's end. `system`: they begin with a system message; `dialogue`: there are
    messages other than system messages; `role`: that of the last one; `tools`: a digest of the tools declared at their
    beginning, if any."""

    system: bool
    dialogue: bool
    role: str
    tools: str = ""


class SavedTurn(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A committed turn, as token ids. `conversation`: `None` if it does not consist of messages. `cut`: whether the
    history was cut inside its input."""

    input: list[int]
    output: list[int]
    conversation: Standing | None = None
    cut: bool = False


class SessionDocument(View, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole session except its memory, which is computed again.

    `model`: a fingerprint of the model's vocabulary. `sha256`: the checksum of all other fields, in hexadecimal."""

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
    sha256: str = ""

    @property
    def tokens(self) -> int:
        """The number of tokens in its turns."""
        return sum(len(turn.input) + len(turn.output) for turn in self.turns)

    def policy(self, tenant: str = "") -> Policy:
        """Returns the session's policy, with `tenant` as its owner. Raises `InvalidRequest`."""
        metadata = tuple(self.metadata.items())
        return Policy(self.priority, self.ttl, self.max_tokens, tenant=tenant, metadata=metadata)

    def signed(self, model: str) -> SessionDocument:
        """Returns a copy with the fingerprint of its model and the checksum."""
        complete = msgspec.structs.replace(self, model=model)
        return msgspec.structs.replace(complete, sha256=_digest(complete))

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
    rest = msgspec.structs.replace(document, sha256="")
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
