"""Parsers of options as people write them: sizes of memory, times to live, and paths."""

from __future__ import annotations

import re
from contextlib import suppress
from os import PathLike, fspath
from typing import Any

from tenuto.base.checks import real, seconds, shown, whole
from tenuto.base.errors import ConfigError

MAX_BYTES = 2**60
_UNITS = {f"{prefix}iB": 2 ** (10 * power) for power, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}B": 10 ** (3 * power) for power, prefix in enumerate("kMGT", 1)}
_SIZE = f"a number of bytes, or a size such as 4GiB (in {', '.join(_UNITS)})"
_SHARE = "a share of the device's memory such as 0.5"


def parse_memory(name: str, given: Any) -> int | float | None:
    """Returns bytes as an int, or a share of the device's memory as a float. Raises `ConfigError`."""
    amount = _amount(name, given, f"{_SIZE}, or {_SHARE}") if isinstance(given, str) else given
    if isinstance(amount, float):
        return real(name, amount, 0.0, 1.0, ConfigError, above=True)
    return None if amount is None else whole(name, amount, 1, MAX_BYTES, ConfigError)


def parse_size(name: str, given: Any) -> int:
    """Returns a size in bytes, which may be 0. Raises `ConfigError`."""
    amount = _amount(name, given, _SIZE) if isinstance(given, str) else given
    return whole(name, amount, 0, MAX_BYTES, ConfigError)


def parse_ttl(name: str, given: Any) -> float | None:
    """Returns seconds; `None` for 0 and "none". Raises `ConfigError`."""
    if isinstance(given, str):
        with suppress(ValueError):  # `seconds` raises the error
            given = None if given.strip().lower() == "none" else float(given)
    return None if given == 0 and not isinstance(given, bool) else seconds(name, given, ConfigError)


def parse_path(name: str, given: Any) -> str | None:
    """Returns a path; `None` for "none". Raises `ConfigError`."""
    if given is None or given == "none":
        return None
    if not isinstance(given, str | PathLike):
        raise ConfigError(f"{name} is {shown(given)}; allowed: a path, or none")
    return fspath(given)


def parse_directory(name: str, given: Any) -> str:
    """Returns a path; "" for "none". Raises `ConfigError`."""
    return parse_path(name, given) or ""


def _amount(name: str, text: str, allowed: str) -> int | float:
    """Returns bytes as an int; a number with a decimal point and no unit is returned as a float. Raises
    `ConfigError`."""
    found = re.fullmatch(rf"(\d{{1,18}}|\d{{0,15}}\.\d{{1,15}}) ?({'|'.join(_UNITS)})?", text.strip(), re.ASCII)
    if found is None:
        raise ConfigError(f"{name} is {shown(text)}; allowed: {allowed}")
    number, unit = found.groups()
    if unit:
        return int(float(number) * _UNITS[unit])
    return float(number) if "." in number else int(number)
