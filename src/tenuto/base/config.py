"""Configuration, resolved once before anything is built. The only reader of the environment."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec

from tenuto.base.checks import MAX_COUNT, SECONDS, Bounds, check_options, option, shown
from tenuto.base.errors import ConfigError

WEIGHTS = Bounds(0.01, 100.0)
"""Of tenants."""
_AT_LEAST_ONE = Bounds(1, MAX_COUNT)

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a tenant may have at once; `None`: no limit of its own. Open `turns`, of which `queued` may wait for a busy
    session; open `sessions`, of which `pinned` may be so; committed `tokens` in them. `units`: of memory (pages and
    state slots) that its sessions keep on the device; idle ones leave it when others are to start. `journal_bytes`:
    about what a journal has of them. What sessions share counts for each. A session whose history takes
    `session_units`, or `session_journal_bytes`, goes no further."""

    turns: Count | None = None
    queued: Count | None = None
    sessions: Count | None = None
    pinned: Count | None = None
    tokens: Count | None = None
    units: Count | None = None
    journal_bytes: Count | None = None
    session_units: Count | None = None
    session_journal_bytes: Count | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine runs.

    `context_length` is in tokens. `token_budget` is the most tokens one step computes, and `mixed_budget` the most if
    there are decodes among them, which have to wait for its end. Both must exceed `max_running`, the most turns in one
    step, so that prefills progress beside decodes. `overlap` 1 plans a step while the previous one is in flight.
    `lookahead` is the most tokens a proposer may guess ahead of a turn. A turn gains one priority for every
    `aging_seconds` it waits. Checkpoints are taken every `checkpoint_interval` tokens of a long prefill, rounded up to
    whole pages; those that only save work hold at most `checkpoint_share` of each pool. With `prefix_cache`, turns
    start from what other sessions of their tenant, closed ones included, have in memory of the same tokens. The memory
    of idle sessions that has to yield goes to `host_tier` bytes of host memory, and from there to files in the
    directory `disk_tier` (empty: none), at most `disk_tier_size` bytes (0: no limit). An engine that is closed and
    whose sessions outlive it takes up to `snapshot_seconds` to leave their memory there. `tenant_weights` are tenants'
    relative shares of rows and prefill tokens, 1 unless named here. `draft_timeout` is in seconds since the draft last
    changed. A full recount, which may take several steps, begins every `audit_every` steps (0: only on demand). A
    `strict` engine recounts everything after every step instead, at one go, and logs every recount."""

    context_length: int = option(8192, bounds=_AT_LEAST_ONE)
    max_running: int = option(32, bounds=_AT_LEAST_ONE)
    max_sessions: int = option(100_000, bounds=_AT_LEAST_ONE)
    max_queued: int = option(10_000, bounds=_AT_LEAST_ONE)
    token_budget: int = option(1024, bounds=_AT_LEAST_ONE)
    mixed_budget: int = option(512, bounds=_AT_LEAST_ONE)
    overlap: int = option(0, bounds=Bounds(0, 1))
    lookahead: int = option(0, bounds=Bounds(0, MAX_COUNT))
    aging_seconds: float = option(10.0, bounds=SECONDS)
    checkpoint_interval: int = option(512, bounds=_AT_LEAST_ONE)
    checkpoint_share: float = option(0.8, bounds=Bounds(0.0, 1.0))
    prefix_cache: bool = option(default=True)
    host_tier: int = option(0, bounds=Bounds(0, MAX_COUNT))
    disk_tier: str = ""
    disk_tier_size: int = option(0, bounds=Bounds(0, MAX_COUNT))
    snapshot_seconds: float = option(30.0, bounds=Bounds(0.0, 86400.0))
    tenant_weights: tuple[tuple[str, float], ...] = ()
    draft_timeout: float = option(60.0, bounds=SECONDS)
    audit_every: int = option(1000, bounds=Bounds(0, MAX_COUNT))
    strict: bool = option(default=False)

    def __post_init__(self) -> None:
        check_options(self, ConfigError)
        for name in ("token_budget", "mixed_budget"):
            if (budget := getattr(self, name)) <= self.max_running:
                raise ConfigError(
                    f"{name} is {budget}; allowed: more than max_running ({self.max_running}), "
                    "so that prefills progress beside decodes"
                )
        for tenant, weight in self.tenant_weights:
            WEIGHTS.check(f"the weight of tenant {tenant!r}", weight, ConfigError)


class EngineOptions(TypedDict, total=False):
    """Fields of `EngineConfig`, all optional."""

    context_length: int
    max_running: int
    max_sessions: int
    max_queued: int
    token_budget: int
    mixed_budget: int
    overlap: int
    lookahead: int
    aging_seconds: float
    checkpoint_interval: int
    checkpoint_share: float
    prefix_cache: bool
    host_tier: int
    disk_tier: str
    disk_tier_size: int
    snapshot_seconds: float
    tenant_weights: tuple[tuple[str, float], ...]
    draft_timeout: float
    audit_every: int
    strict: bool


def engine_config(given: EngineOptions, max_context: int | None = None) -> EngineConfig:
    """Resolve the configuration. The default context length is capped at the model's, `max_context`. Raises
    `ConfigError`."""
    unknown = given.keys() - EngineOptions.__annotations__.keys()
    if unknown:
        raise ConfigError(f"unknown engine options {sorted(unknown)}; allowed: {sorted(EngineOptions.__annotations__)}")
    if "tenant_weights" in given:
        given = {**given, "tenant_weights": _pairs(given["tenant_weights"])}
    config = EngineConfig(**given)
    if max_context is None or config.context_length <= max_context:
        return config
    if "context_length" not in given:
        return replace(config, context_length=max_context)
    raise ConfigError(f"context_length is {config.context_length}; allowed: at most the model's {max_context} tokens")


def _pairs(weights: Iterable[Iterable[Any]]) -> tuple[tuple[str, float], ...]:
    """Tenants' weights from any pairs. Raises `ConfigError`."""
    try:
        return tuple((tenant, weight) for tenant, weight in weights)
    except (TypeError, ValueError):
        raise ConfigError(f"tenant_weights is {shown(weights)}; allowed: pairs of a tenant and its weight") from None


def user_path(path: str) -> Path:
    """A path that may begin with `~`. Raises `ConfigError` if the home directory is not known."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{path!r} begins with ~, but there is no home directory: set HOME") from None


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of downloaded models and compiled kernels: `$TENUTO_CACHE`, else `tenuto` in `$XDG_CACHE_HOME` or
    `~/.cache`. If that does not exist and cannot be made (no home, or a read-only one), it is `tenuto-` and the user's
    number in the system's temporary directory. Raises `ConfigError` if that belongs to another user."""
    own = environ.get("TENUTO_CACHE")
    if own:
        return user_path(own)
    with suppress(RuntimeError, PermissionError):  # there is no home directory, or it belongs to another user
        base = environ.get("XDG_CACHE_HOME")
        usual = (Path(base) if base else Path.home() / ".cache") / "tenuto"
        if usual.exists() or _can_make(usual):
            return usual
    return _private(Path(tempfile.gettempdir()) / f"tenuto-{os.getuid()}")


def _can_make(directory: Path) -> bool:
    there = next(parent for parent in directory.absolute().parents if parent.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _private(directory: Path) -> Path:
    """Make a directory that only its owner may use. In a place that all users share, another may have made it first."""
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{directory} is not a directory of this user alone: set TENUTO_CACHE to one, or remove it")
    return directory
