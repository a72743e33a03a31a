"""The error tree: every error a caller can meet has a code and an HTTP status.

Three kinds of failure have three forms. "Not now" is `None`; a mistake of the caller is a `TenutoError`; a broken
invariant is an `InvariantError`, which stops the engine with a report.
"""

from __future__ import annotations


class TenutoError(Exception):
    """Base of the errors meant for the caller: what was wrong and what is allowed. The refused operation changed
    nothing. `param`: the field or option at fault, if it is a single one. `detail`: added in logs, but never sent to
    clients of a server, since it may name sessions of others."""

    code = "error"
    status = 500

    def __init__(self, message: str = "", *, param: str | None = None, detail: str = "") -> None:
        super().__init__(f"{message}: {detail}" if detail else message)
        self.message = message
        self.param = param
        self.detail = detail


class InvalidRequest(TenutoError):
    """A value is malformed or out of range."""

    code = "invalid_request"
    status = 400


class ContextExceeded(TenutoError):
    """History and input leave no room in the context for one output token, or the input does not fit into memory even
    when all of it is free."""

    code = "context_exceeded"
    status = 400


class NotFound(TenutoError):
    """No session, turn or model has that name."""

    code = "not_found"
    status = 404


class ModelNotFound(NotFound):
    """The request names a model that the server does not run."""

    code = "model_not_found"


class AlreadyExists(TenutoError):
    """The id is already in use."""

    code = "already_exists"
    status = 409


class SessionBusy(TenutoError):
    """The session has an open turn and the operation needs it to have none."""

    code = "session_busy"
    status = 409


class IllegalTransition(TenutoError):
    """The operation is not possible in the present state of the session or turn."""

    code = "illegal_transition"
    status = 409


class VersionMismatch(TenutoError):
    """The session has changed since the version that the caller saw."""

    code = "version_mismatch"
    status = 412


class SessionClosed(TenutoError):
    """The session is closing or closed."""

    code = "session_closed"
    status = 410


class Overloaded(TenutoError):
    """A configured limit on sessions or queued turns is reached; try again later."""

    code = "overloaded"
    status = 429


class LimitReached(TenutoError):
    """A tenant has reached one of its limits."""

    code = "limit_reached"
    status = 429


class TooLarge(TenutoError):
    """The body of a request is larger than allowed."""

    code = "too_large"
    status = 413


class HeadersTooLarge(TenutoError):
    """The headers of a request are too large or too many."""

    code = "headers_too_large"
    status = 431


class RequestTimeout(TenutoError):
    """A request did not arrive completely in time."""

    code = "request_timeout"
    status = 408


class ServerFull(TenutoError):
    """The server has reached its limit on connections; try again later."""

    code = "server_full"
    status = 503


class UnsupportedMediaType(TenutoError):
    """The body of a request has the wrong content type."""

    code = "unsupported_media_type"
    status = 415


class NoRoom(TenutoError):
    """The disk has no room for a file."""

    code = "no_room"
    status = 507


class Unauthorized(TenutoError):
    """The request has no key, or an unknown one."""

    code = "unauthorized"
    status = 401


class Forbidden(TenutoError):
    """The key does not allow this."""

    code = "forbidden"
    status = 403


class KeyReused(TenutoError):
    """An idempotency key was used with another request."""

    code = "idempotency_key_reused"
    status = 422


class ResultNotKept(TenutoError):
    """The turn of a repeated request was committed, but its answer was too large to be kept."""

    code = "result_not_kept"
    status = 410


class Unsupported(TenutoError):
    """The request uses a part of an interface that is not implemented here."""

    code = "unsupported"
    status = 400


class ConfigError(TenutoError):
    """A configuration value or a model file is unknown, malformed or does not fit the machine."""

    code = "config_error"
    status = 500


class ModelError(TenutoError):
    """A model's files are missing, damaged or of a kind that is not supported."""

    code = "model_error"
    status = 500


class EngineStopped(TenutoError):
    """The engine has stopped, by request or after an `InvariantError`. A turn that was under way may have been
    committed: if so, it is in the session's history once that is served again."""

    code = "engine_stopped"
    status = 503


class MemoryReleased(TenutoError):
    """The memory that turns need has been returned to the system. Turns can run again after a resume."""

    code = "memory_released"
    status = 503


class NotAcknowledged(TenutoError):
    """Commits cannot be made durable at present. A turn that ends with this error is committed in memory, but may be
    lost. Any other request that fails with it was not carried out, or its answer would have shown a commit that may be
    lost."""

    code = "not_acknowledged"
    status = 503


class DeadlinePassed(TenutoError):
    """A turn waited for its session until one of its deadlines had passed."""

    code = "deadline_passed"
    status = 504


class TurnAborted(TenutoError):
    """Another request ended the turn before it was committed. Its status is one that HTTP clients do not retry."""

    code = "turn_aborted"
    status = 410


class GrammarFailed(TenutoError):
    """A turn's grammar or JSON schema proved too complex, or no token of the model can satisfy it. The turn was rolled
    back."""

    code = "grammar_failed"
    status = 400


class TurnFailed(TenutoError):
    """The steps that ran the turn kept failing, so it was rolled back."""

    code = "turn_failed"
    status = 503


class Draining(TenutoError):
    """The server is shutting down and accepts nothing new."""

    code = "draining"
    status = 503


class Unreachable(TenutoError):
    """A client cannot connect to its server."""

    code = "unreachable"
    status = 503


class Disconnected(TenutoError):
    """A client's connection broke before the answer was complete. The request may have been carried out."""

    code = "disconnected"
    status = 503


class StepFailed(Exception):
    """An executor could not finish a step. The engine preempts the turns in it; no caller sees this."""


class InvariantError(Exception):
    """A bug in Tenuto: memory or state breaks a rule. The engine stops and reports; values are never clamped."""
