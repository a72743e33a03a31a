"""Memory and cores of devices. PyTorch, which takes a second or more to load, is used only for devices other than the
CPU."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from tenuto.base.config import EngineOptions
from tenuto.base.errors import ConfigError

SHARE_OF_MACHINE = 0.25
SHARE_OF_DEVICE = 0.85

ON_CUDA: EngineOptions = {"token_budget": 4096, "mixed_budget": 2048, "max_running": 256, "overlap": 1}
"""A CUDA device computes thousands of tokens in the time that their weights take to be read, and many turns at once.
While it computes, the host plans the next step."""


def engine_defaults(kind: str) -> EngineOptions:
    """Returns the options of engines that are better for a `kind` of device, such as `cuda`, than their general
    defaults."""
    return {**ON_CUDA} if kind == "cuda" else {}


def is_cpu(device: str) -> bool:
    """Whether `device`, a name in PyTorch's form, is the CPU."""
    return re.fullmatch(r"cpu(:\d{1,3})?", device) is not None


def check_device(device: str) -> None:
    """Raises `ConfigError` if PyTorch cannot compute on `device`."""
    if is_cpu(device):
        return
    import torch  # noqa: PLC0415 - see the module's docstring

    try:
        torch.empty(0, device=torch.device(device))
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {device!r} cannot be used: {error}") from error


def trim() -> None:
    """Gives the free device memory that PyTorch keeps in reserve back to the system."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def spare_bytes(device: str) -> int:
    """Returns the bytes that a server may use for model state once the weights are loaded: a share of the machine's
    memory, or of the free memory of a CUDA device."""
    if _is_cuda(device):
        import torch  # noqa: PLC0415 - loaded where it is used

        return int(torch.cuda.mem_get_info(device)[0] * SHARE_OF_DEVICE)
    return int(machine_bytes() * SHARE_OF_MACHINE)


def total_bytes(device: str) -> int:
    """Returns the bytes of a CUDA device's memory, or of the machine's. Raises `ConfigError` if the device is
    missing."""
    try:
        if _is_cuda(device):
            import torch  # noqa: PLC0415 - loaded where it is used

            return int(torch.cuda.get_device_properties(device).total_memory)
    except (RuntimeError, AssertionError) as error:  # PyTorch's errors for a missing device
        raise ConfigError(f"there is no device {device!r} whose memory could be shared: {error}") from None
    return machine_bytes()


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Returns the number of cores this process may use: those of its affinity, limited by its control group's `quota`
    (format: "max period" or "microseconds period", see the kernel's `cgroup-v2.rst`)."""
    cores = len(os.sched_getaffinity(0))
    try:
        paid, period = quota.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    return cores if paid == "max" else max(1, min(cores, int(paid) // int(period)))


def _is_cuda(device: str) -> bool:
    if is_cpu(device):
        return False
    import torch  # noqa: PLC0415 - loaded where it is used

    return torch.device(device).type == "cuda"


def machine_bytes(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Returns the bytes of the machine's memory, or of its control group's `limit` if that is less (format: "max" or
    bytes, see the kernel's `cgroup-v2.rst`)."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        allowed = limit.read_text(encoding="ascii").strip()
    except OSError:
        return physical
    return min(physical, int(allowed)) if allowed.isdecimal() else physical
