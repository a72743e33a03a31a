"""How much memory `--memory` and other options ask for."""

from __future__ import annotations

import re

from tenuto.base.errors import ConfigError
from tenuto.exec.device import total_bytes

_UNITS = {f"{prefix}iB": 2 ** (10 * power) for power, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}B": 10 ** (3 * power) for power, prefix in enumerate("kMGT", 1)}
_ALLOWED = (
    f"a number of bytes, a size such as 4GiB (in {', '.join(_UNITS)}), or a share of the device's memory such as 0.5"
)


def read_memory(text: str, device: str) -> int:
    """The size in bytes. A share is of the GPU's memory, or of the machine's. Raises `ConfigError`."""
    number, unit = _split(text)
    if unit:
        wanted = float(number) * _UNITS[unit]
    elif "." in number:
        if not 0 < float(number) <= 1:
            raise ConfigError(f"memory is {text}; allowed as a share: more than 0 and at most 1.0")
        wanted = float(number) * total_bytes(device)
    else:
        wanted = int(number)
    if wanted < 1:
        raise ConfigError(f"memory is {text}; allowed: at least one byte")
    return int(wanted)


def read_size(name: str, text: str) -> int:
    """A number of bytes, which may be 0. Raises `ConfigError`."""
    number, unit = _split(text, name)
    if not unit and "." in number:
        raise ConfigError(f"{name} is {text}; allowed: a number of bytes, or a size such as 4GiB")
    return int(float(number) * _UNITS[unit]) if unit else int(number)


def _split(text: str, name: str = "memory") -> tuple[str, str]:
    """A number and its unit, if any."""
    found = re.fullmatch(rf"(\d{{1,18}}|\d{{0,15}}\.\d{{1,15}}) ?({'|'.join(_UNITS)})?", text.strip(), re.ASCII)
    if found is None:
        raise ConfigError(f"{name} is {text[:40]!r}; allowed: {_ALLOWED}")
    return found[1], found[2] or ""
