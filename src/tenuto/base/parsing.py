"""Options as people write them: sizes of memory, times to live, paths, and levels of logs."""

from __future__ import annotations

import re
from contextlib import suppress
from os import PathLike, fspath
from typing import Any

from tenuto.base.checks import real, seconds, shown, whole
from tenuto.base.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
"""Of logs."""
MAX_BYTES = 2**60
_UNITS = {f"{prefix}iB": 2 ** (10 * power) for power, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}B": 10 ** (3 * power) for power, prefix in enumerate("kMGT", 1)}
_SIZE = f"a number of bytes, or a size such as 4GiB (in {', '.join(_UNITS)})"
_SHARE = "a share of the device's memory such as 0.5"


def parse_memory(name: str, given: Any) -> int | float | None:
    """Bytes as an int, or a share of the device's memory as a float. Raises `ConfigError`."""
    number, unit = _split(name, given, f"{_SIZE}, or {_SHARE}") if isinstance(given, str) else (given, "")
    if isinstance(given, str):
        number = float(number) if "." in number and not unit else _bytes(number, unit)
    if isinstance(number, float):
        return real(name, number, 0.0, 1.0, ConfigError, above=True)
    return None if number is None else whole(name, number, 1, MAX_BYTES, ConfigError)


def parse_size(name: str, given: Any) -> int:
    """Bytes, which may be 0. Raises `ConfigError`."""
    if isinstance(given, str):
        number, unit = _split(name, given, _SIZE)
        if not unit and "." in number:
            raise ConfigError(f"{name} is {given}; allowed: {_SIZE}")
        given = _bytes(number, unit)
    return whole(name, given, 0, MAX_BYTES, ConfigError)


def parse_ttl(name: str, given: Any) -> float | None:
    """Seconds; `None` for 0 and "none". Raises `ConfigError`."""
    if isinstance(given, str):
        with suppress(ValueError):  # `seconds` says what is allowed
            given = None if given.strip().lower() == "none" else float(given)
    return None if given == 0 and not isinstance(given, bool) else seconds(name, given, ConfigError)


def parse_path(name: str, given: Any) -> str | None:
    """A path; `None` for "none". Raises `ConfigError`."""
    if given is None or given == "none":
        return None
    if not isinstance(given, str | PathLike):
        raise ConfigError(f"{name} is {shown(given)}; allowed: a path, or none")
    return fspath(given)


def parse_directory(name: str, given: Any) -> str:
    """A path; "" for "none". Raises `ConfigError`."""
    return parse_path(name, given) or ""


def parse_level(name: str, given: Any) -> str:
    """One of `LEVELS`, in either case. Raises `ConfigError`."""
    if not isinstance(given, str) or given.lower() not in LEVELS:
        raise ConfigError(f"{name} is {shown(given)}; allowed: {', '.join(LEVELS)}")
    return given.lower()


def _split(name: str, text: str, allowed: str) -> tuple[str, str]:
    """A number and its unit, if any."""
    found = re.fullmatch(rf"(\d{{1,18}}|\d{{0,15}}\.\d{{1,15}}) ?({'|'.join(_UNITS)})?", text.strip(), re.ASCII)
    if found is None:
        raise ConfigError(f"{name} is {text[:40]!r}; allowed: {allowed}")
    return found[1], found[2] or ""


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit]) if unit else int(number)
