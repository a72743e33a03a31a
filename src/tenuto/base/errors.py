"""The error tree: every error a caller can meet has a code and an HTTP status.

Three kinds of failure have three forms. "Not now" is `None`; a mistake of the caller is a `TenutoError`; a broken
invariant is an `InvariantError`, which stops the engine with a report.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self


class TenutoError(Exception):
    """Base of the errors meant for the caller: what was wrong and what is allowed. The refused operation changed
    nothing. `param`: the field or option at fault, if it is a single one. `detail`: added in logs, but never sent to
    clients of a server, since it may name sessions of others. `details`: values for programs, by names."""

    code = "error"
    status = 500

    def __init_subclass__(cls, code: str = "", status: int = 0) -> None:
        """Without `code` or `status` the subclass has that of its base."""
        super().__init_subclass__()
        cls.code, cls.status = code or cls.code, status or cls.status

    def __init__(
        self,
        message: str = "",
        *,
        param: str | None = None,
        detail: str = "",
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(f"{message}: {detail}" if detail else message)
        self.message = message
        self.param = param
        self.detail = detail
        self.details = details


class InvalidRequest(TenutoError, code="invalid_request", status=400):
    """A value is malformed or out of range."""


class ContextExceeded(TenutoError, code="context_exceeded", status=400):
    """History and input leave no room in the context for one output token, or the input does not fit into memory even
    when all of it is free. Its details, if known: `prompt_tokens`, at least as many as history and input have, and
    `context_length`."""

    @classmethod
    def of(cls, found: int, allowed: int, limit: int, *, exact: bool) -> Self:
        """Returns the error of a history and input of `found` tokens, or of at least so many unless `exact`, of which
        `allowed` would fit in a context of `limit`."""
        least = "" if exact else "at least "
        return cls(
            f"history and input have {least}{found} tokens; allowed: {allowed} of a context of {limit}",
            details={"prompt_tokens": found, "context_length": limit},
        )


class NotFound(TenutoError, code="not_found", status=404):
    """No session, turn or model has that name."""


class ModelNotFound(NotFound, code="model_not_found"):
    """The request names a model that the server does not run."""


class AlreadyExists(TenutoError, code="already_exists", status=409):
    """The id is already in use."""


class SessionBusy(TenutoError, code="session_busy", status=409):
    """The session has an open turn and the operation needs it to have none."""


class IllegalTransition(TenutoError, code="illegal_transition", status=409):
    """The operation is not possible in the present state of the session or turn."""


class AdapterBusy(TenutoError, code="adapter_busy", status=409):
    """An adapter cannot be unloaded while turns with it are open."""


class AdapterNotLoaded(TenutoError, code="adapter_not_loaded", status=409):
    """The session's adapter is not loaded, so its turns cannot run. Its history is kept."""


class VersionMismatch(TenutoError, code="version_mismatch", status=412):
    """The session has changed since the version that the caller saw."""


class SessionClosed(TenutoError, code="session_closed", status=410):
    """The session is closing or closed."""


class Overloaded(TenutoError, code="overloaded", status=429):
    """A configured limit on sessions or queued turns is reached; try again later."""


class LimitReached(TenutoError, code="limit_reached", status=429):
    """A tenant has reached one of its limits."""


class TooLarge(TenutoError, code="too_large", status=413):
    """The body of a request is larger than allowed."""


class HeadersTooLarge(TenutoError, code="headers_too_large", status=431):
    """The headers of a request are too large or too many."""


class RequestTimeout(TenutoError, code="request_timeout", status=408):
    """A request did not arrive completely in time."""


class ServerFull(TenutoError, code="server_full", status=503):
    """The server has reached its limit on connections; try again later."""


class UnsupportedMediaType(TenutoError, code="unsupported_media_type", status=415):
    """The body of a request has the wrong content type."""


class NotAcceptable(TenutoError, code="not_acceptable", status=406):
    """The request accepts no format in which the answer can be given."""


class ExtraMissing(TenutoError, code="extra_missing", status=501):
    """An optional library, which this needs, is not installed on the server."""


class NoRoom(TenutoError, code="no_room", status=507):
    """There is no room: on the disk for a file, or at a replica for the state of a session that is to move there."""


class Unauthorized(TenutoError, code="unauthorized", status=401):
    """The request has no key, or an unknown one."""


class Forbidden(TenutoError, code="forbidden", status=403):
    """The key does not allow this."""


class KeyReused(TenutoError, code="idempotency_key_reused", status=422):
    """An idempotency key was used with another request."""


class ResultNotKept(TenutoError, code="result_not_kept", status=410):
    """The turn of a repeated request was committed, but its answer was too large to be kept."""


class Unsupported(TenutoError, code="unsupported", status=400):
    """The request uses a part of an interface that is not implemented here."""


class ConfigError(TenutoError, code="config_error", status=500):
    """A configuration value or a model file is unknown, malformed or does not fit the machine."""


class ModelError(TenutoError, code="model_error", status=500):
    """A model's files are missing, damaged or of a kind that is not supported."""


class EngineStopped(TenutoError, code="engine_stopped", status=503):
    """The engine has stopped, by request or after an `InvariantError`. A turn that was under way may have been
    committed: if so, it is in the session's history once that is served again."""


class MemoryReleased(TenutoError, code="memory_released", status=503):
    """The memory that turns need has been returned to the system. Turns can run again after a resume."""


class NotAcknowledged(TenutoError, code="not_acknowledged", status=503):
    """Commits cannot be made durable at present. A turn that ends with this error is committed in memory, but may be
    lost. Any other request that fails with it was not carried out, or its answer would have shown a commit that may be
    lost."""


class SessionDamaged(TenutoError, code="session_damaged", status=500):
    """The session's rows in the database of its fleet are damaged, so it is not served."""


class ObjectDamaged(TenutoError, code="object_damaged", status=500):
    """The rows of an object, such as a conversation, in the database of the fleet are damaged, so it is not served."""


class Misdirected(TenutoError, code="misdirected", status=421):
    """A request is for a session that this replica does not own, or that is moving to another one. It was not carried
    out."""


class DeadlinePassed(TenutoError, code="deadline_passed", status=504):
    """A turn waited for its session until one of its deadlines had passed."""


class TurnAborted(TenutoError, code="turn_aborted", status=410):
    """Another request ended the turn before it was committed. Its status is one that HTTP clients do not retry."""


class GrammarFailed(TenutoError, code="grammar_failed", status=400):
    """A turn's grammar or JSON schema proved too complex, or no token of the model can satisfy it and its
    bad words. The turn was rolled back."""


class TurnFailed(TenutoError, code="turn_failed", status=503):
    """The steps that ran the turn kept failing, so it was rolled back."""


class Draining(TenutoError, code="draining", status=503):
    """The server is shutting down and accepts nothing new."""


class Unreachable(TenutoError, code="unreachable", status=503):
    """A client cannot connect to its server."""


class Disconnected(TenutoError, code="disconnected", status=503):
    """A client's connection broke before the answer was complete. The request may have been carried out."""


class StepFailed(Exception):
    """An executor could not finish a step. The engine preempts the turns in it; no caller sees this."""


class ExecutorLost(Exception):
    """A process that computes a part of the model has ended, or the parts no longer agree. The engine stops."""


class InvariantError(Exception):
    """A bug in Tenuto: memory or state breaks a rule. The engine stops and reports; values are never clamped."""
