"""Configuration, resolved once before anything is built. The only reader of the environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec

from tenuto.base.checks import MAX_COUNT, real, seconds, shown, whole
from tenuto.base.errors import ConfigError

MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
"""Bounds of a tenant's weight."""


Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a tenant may have at once; `None`: no limit of its own. Open `turns`, of which `queued` may wait for a busy
    session; open `sessions`; committed `tokens` in them."""

    turns: Count | None = None
    queued: Count | None = None
    sessions: Count | None = None
    tokens: Count | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine runs.

    `context_length` is in tokens. `token_budget` is the most tokens one step computes; it must exceed `max_running`,
    the most turns in one step, so that prefills progress beside decodes. `overlap` 1 plans a step while the previous
    one is in flight. `lookahead` is the most tokens a proposer may guess ahead of a turn. A turn gains one priority for
    every `aging_seconds` it waits. Checkpoints are taken every `checkpoint_interval` tokens of a long prefill,
    rounded up to whole pages; those that only save work hold at most `checkpoint_share` of each pool.
    `tenant_weights` are tenants' relative shares of rows and prefill tokens, 1 unless named here.
    `draft_timeout` is in seconds since the draft last changed. A full recount, which may take several steps, begins
    every `audit_every` steps (0: only on demand)."""

    context_length: int = 8192
    max_running: int = 32
    max_sessions: int = 100_000
    max_queued: int = 10_000
    token_budget: int = 512
    overlap: int = 0
    lookahead: int = 0
    aging_seconds: float = 10.0
    checkpoint_interval: int = 512
    checkpoint_share: float = 0.5
    tenant_weights: tuple[tuple[str, float], ...] = ()
    draft_timeout: float = 60.0
    audit_every: int = 1000

    def __post_init__(self) -> None:
        for name in (
            "context_length",
            "max_running",
            "max_sessions",
            "max_queued",
            "checkpoint_interval",
            "token_budget",
        ):
            whole(name, getattr(self, name), 1, MAX_COUNT, ConfigError)
        for name in ("lookahead", "audit_every"):
            whole(name, getattr(self, name), 0, MAX_COUNT, ConfigError)
        if self.token_budget <= self.max_running:
            raise ConfigError(
                f"token_budget is {self.token_budget}; allowed: more than max_running ({self.max_running}), "
                "so that prefills progress beside decodes"
            )
        whole("overlap", self.overlap, 0, 1, ConfigError)
        for name in ("aging_seconds", "draft_timeout"):
            if seconds(name, getattr(self, name), ConfigError) is None:
                raise ConfigError(f"{name} is none; allowed: more than 0 seconds")
        real("checkpoint_share", self.checkpoint_share, 0, 1, ConfigError)
        for tenant, weight in self.tenant_weights:
            real(f"the weight of tenant {tenant!r}", weight, MIN_WEIGHT, MAX_WEIGHT, ConfigError)


class EngineOptions(TypedDict, total=False):
    """Fields of `EngineConfig`, all optional."""

    context_length: int
    max_running: int
    max_sessions: int
    max_queued: int
    token_budget: int
    overlap: int
    lookahead: int
    aging_seconds: float
    checkpoint_interval: int
    checkpoint_share: float
    tenant_weights: tuple[tuple[str, float], ...]
    draft_timeout: float
    audit_every: int


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


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where downloaded models are stored: `$TENUTO_CACHE`, else `tenuto` in `$XDG_CACHE_HOME` or `~/.cache`."""
    own = environ.get("TENUTO_CACHE")
    if own:
        return Path(own).expanduser()
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tenuto"
