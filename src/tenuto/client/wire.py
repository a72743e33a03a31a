"""What the Python interface says, as the HTTP interface writes it, and back."""

from __future__ import annotations

from operator import index
from typing import Any, SupportsFloat, SupportsIndex

import msgspec

from tenuto.base.errors import InvalidRequest, TenutoError
from tenuto.base.messages import Refusal, error_of
from tenuto.base.options import OF_SAMPLING, RemoteOptions, turn_params
from tenuto.base.turns import EndReason, TurnResult, Usage
from tenuto.base.views import SessionInfo
from tenuto.text.prompt import Input, parse_input


def encode(body: Any) -> bytes:
    """As JSON. Raises `InvalidRequest`."""
    try:
        return msgspec.json.encode(body, enc_hook=_plain)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from None


def _plain(value: object) -> int | float:
    """Numbers of NumPy's, for one."""
    if isinstance(value, SupportsIndex):
        return index(value)
    if isinstance(value, SupportsFloat):
        return float(value)
    raise TypeError(f"there is a {type(value).__name__} in it")


def input_body(given: Input) -> str | list[Any]:
    """Raises `InvalidRequest` if it is neither text, nor token ids, nor messages."""
    if isinstance(given, str):
        return given
    prompt = parse_input(given, None)
    return [{"role": m.role, "content": m.content} for m in prompt.messages] or list(prompt.tokens)


def turn_body(options: RemoteOptions) -> dict[str, Any]:
    """Raises `InvalidRequest` for what is no option, and for values out of range."""
    rest: Any = dict(options)
    body = {name: rest.pop(name) for name in ("if_busy", "on_disconnect") if name in rest}
    params = turn_params(rest)
    for name in rest:
        value = getattr(params.sampling if name in OF_SAMPLING else params, name)
        if value is not None:
            body[name] = dict(value) if name == "logit_bias" else value
    return body


def session_info(body: dict[str, Any]) -> SessionInfo:
    """From a session."""
    return msgspec.convert({**body, "session_id": body["id"], "limit": body["max_tokens"]}, SessionInfo)


def turn_result(body: dict[str, Any]) -> TurnResult:
    """From a turn that has ended."""
    usage = body["usage"]
    return TurnResult(
        EndReason(body["reason"]),
        body["committed"],
        body["version"],
        body["kept"],
        Usage(usage["prompt_tokens"], usage["cached_tokens"], usage["completion_tokens"], usage["computed_tokens"]),
        body["max_new_tokens"],
        body["context_left"],
        body.get("stop"),
    )


def error_from(status: int, content: bytes) -> TenutoError:
    """From an answer that is an error, or an event that says one: of the class that the server raised, if it says."""
    try:
        said = msgspec.json.decode(content, type=_Refused).error
    except msgspec.DecodeError:
        return TenutoError(f"the server answered with status {status} and no reason; is it one of Tenuto's?")
    return error_of(Refusal(call=0, code=str(said.code), message=said.message, param=said.param))


class _Said(msgspec.Struct):
    message: str
    code: str | int | None = None
    param: str | None = None


class _Refused(msgspec.Struct):
    error: _Said
