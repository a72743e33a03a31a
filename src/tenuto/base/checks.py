"""Checks of values from callers. A wrong value raises a typed error at the edge."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from functools import cache
from operator import index
from types import MappingProxyType
from typing import Any, SupportsFloat

from tenuto.base.errors import InvalidRequest, TenutoError

MAX_COUNT = 2**40
"""The largest count that a caller may give."""
MAX_SECONDS = 1e9
"""The longest time span, about 30 years."""


def wrong(
    name: str, value: object, allowed: str, *, param: str | None = None, error: type[TenutoError] = InvalidRequest
) -> TenutoError:
    """Returns the error for a `value` that is not `allowed`. `param`: the field at fault; `name` if that is an option's
    name."""
    return error(f"{name} is {shown(value)}; allowed: {allowed}", param=param or _param(name))


def whole(
    name: str,
    value: object,
    low: int,
    high: int,
    error: type[TenutoError] = InvalidRequest,
    *,
    param: str | None = None,
) -> int:
    """Returns `value` as an integer in [low, high]; bools are rejected. Raises `error`. `param`: see `wrong`."""
    try:
        number = index(value)  # type: ignore[arg-type] # whatever the caller gave
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not low <= number <= high:
        raise wrong(name, value, f"a whole number from {low} to {high}", param=param, error=error)
    return number


def real(
    name: str,
    value: object,
    low: float,
    high: float,
    error: type[TenutoError] = InvalidRequest,
    *,
    above: bool = False,
) -> float:
    """Returns `value` as a number in [low, high], or with `above` in (low, high]. Raises `error`."""
    number = _float(value)
    if number is None or not low <= number <= high or (above and number == low):
        allowed = f"more than {low:g} and at most {high:g}" if above else f"a number from {low:g} to {high:g}"
        raise wrong(name, value, allowed, error=error)
    return number


def seconds(name: str, value: object, error: type[TenutoError] = InvalidRequest) -> float | None:
    """Returns `value` as a time span of more than 0 seconds; `None` stays `None`. Raises `error`."""
    if value is None:
        return None
    number = _float(value)
    if number is None or not 0 < number <= MAX_SECONDS:
        allowed = f"more than 0 and at most {MAX_SECONDS:g} seconds, or none"
        raise wrong(name, value, allowed, error=error)
    return number


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of an option: `low` to `high`, only whole numbers if both are ints; `above` excludes `low` itself."""

    low: float
    high: float
    above: bool = False

    def check(self, name: str, value: object, error: type[TenutoError] = InvalidRequest) -> float:
        """Returns `value` as a Python number. Raises `error`."""
        if isinstance(self.low, int) and isinstance(self.high, int):
            return whole(name, value, self.low, self.high, error)
        return real(name, value, self.low, self.high, error, above=self.above)


SECONDS = Bounds(0.0, MAX_SECONDS, above=True)


def option(
    default: Any,
    description: str = "",
    allowed: Bounds | tuple[str, ...] | Callable[[str, Any], Any] | None = None,
    *,
    secret: bool = False,
    internal: str = "",
    names: Mapping[str, str | tuple[str, ...]] = MappingProxyType({}),
) -> Any:
    """Returns a dataclass field for an option, with a description for users. `allowed`: bounds, a list of texts (in
    upper or lower case), or a function that returns the checked value from the option's name and a given value; the
    default is always allowed. A `secret` is not shown. `internal`: the reason why users cannot set the option by its
    name. `names`: its names by API, and further flags under "cli"; of several names in one API the first takes
    precedence."""
    metadata: dict[str, Any] = {"description": description, "allowed": allowed, "secret": secret, "internal": internal}
    metadata["names"] = {api: (name,) if isinstance(name, str) else name for api, name in names.items()}
    return field(default=default, repr=not secret, metadata=metadata)


def check_options(options: Any, error: type[TenutoError] = InvalidRequest) -> None:
    """Checks every `option` field and converts numbers to Python's own; for `__post_init__`. Raises `error`."""
    for each in _checked(options.__class__):
        if (value := getattr(options, each.name)) is not each.default:
            object.__setattr__(options, each.name, check_option(each, value, error))


def check_option(declared: Field[Any], value: Any, error: type[TenutoError] = InvalidRequest) -> Any:
    """Returns the checked value of an `option` field. Raises `error` if it is not allowed."""
    name, allowed = declared.name, declared.metadata["allowed"]
    if value is declared.default:
        return value
    if isinstance(allowed, Bounds):
        return allowed.check(name, value, error)
    if isinstance(allowed, tuple):
        if not isinstance(value, str) or value.lower() not in allowed:
            raise wrong(name, value, ", ".join(allowed), error=error)
        return value.lower()
    if callable(allowed):
        return allowed(name, value)
    return flag(name, value, error) if isinstance(declared.default, bool) else value


@cache
def _checked(options: type[Any]) -> tuple[Field[Any], ...]:
    """Returns the fields that `check_option` can reject."""
    each = (one for one in fields(options) if one.metadata)
    return tuple(one for one in each if isinstance(one.default, bool) or one.metadata["allowed"] is not None)


def items(name: str, value: object, allowed: str) -> tuple[Any, ...]:
    """Returns the items of a collection as a tuple. Raises `InvalidRequest`, which names what is `allowed`, for
    mappings, text, bytes and values that are not collections."""
    if isinstance(value, tuple):
        return value
    if not isinstance(value, str | bytes | bytearray | memoryview | Mapping) and isinstance(value, Iterable):
        with suppress(TypeError):  # a zero-dimensional array claims to be iterable but is not
            return tuple(value)
    raise wrong(name, value, allowed)


def flag(name: str, value: object, error: type[TenutoError] = InvalidRequest) -> bool:
    """Returns `value`. Raises `error` unless it is a bool."""
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false", error=error)
    return value


def check_unicode(name: str, value: str) -> None:
    """Raises `InvalidRequest` for lone surrogates, which cannot be stored."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name} has a lone surrogate; allowed: Unicode text", param=_param(name)) from None


def json_text(name: str, value: object, param: str) -> str:
    """Writes a value as JSON. Raises `InvalidRequest` if JSON cannot express it."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} cannot be written as JSON: {error}", param=param) from None


def parsed_json(problem: str, text: str, param: str) -> Any:
    """Parses JSON text. Raises `InvalidRequest`, which begins with `problem`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{problem}: {error}", param=param) from None


def check_json_text(name: str, text: object, most: int) -> None:
    """Raises `InvalidRequest` unless `text`, the JSON in field `name`, is text of at most `most` characters."""
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} are {shown(text)}; allowed: JSON text", param=name)
    if len(text) > most:
        raise InvalidRequest(f"{name} have {len(text)} characters; allowed: at most {most}", param=name)
    check_unicode(name, text)


MAX_NESTING = 128
"""Maximum depth of objects and lists in JSON that chat templates render."""


def check_nesting(name: str, value: object, param: str) -> None:
    """Raises `InvalidRequest` for JSON nested deeper than `MAX_NESTING`, since writers of JSON are recursive."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        inside = [each for each in level if isinstance(each, Mapping | list | tuple)]
        if not inside:
            return
        level = [inner for each in inside for inner in (each.values() if isinstance(each, Mapping) else each)]
    raise InvalidRequest(f"{name} are nested too deeply; allowed: {MAX_NESTING} levels", param=param)


def _param(name: str) -> str | None:
    """Returns `name` if it is an option's name; `None` for a phrase such as "a stop string"."""
    return name if name.isidentifier() else None


def _float(value: object) -> float | None:
    if isinstance(value, (bool, str, bytes)) or not isinstance(value, (float, int, SupportsFloat)):  # the last is slow
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def shown(value: object) -> str:
    """Formats a value for an error message, cut to 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
