"""Configuration, resolved once before anything is built. The only reader of the environment."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec

from tenuto.base.checks import MAX_COUNT, SECONDS, Bounds, check_options, option, shown
from tenuto.base.errors import ConfigError
from tenuto.base.parsing import parse_directory, parse_memory, parse_path, parse_size

WEIGHTS = Bounds(0.01, 100.0)
"""Bounds of a tenant's weight."""
_COUNT = Bounds(1, MAX_COUNT)
_SIZE = Bounds(0, MAX_COUNT)

DEFAULT_MODEL = "smollm2"
"""SmolLM2-135M-Instruct: a chat model small enough for any CPU."""
KERNELS = (
    *("auto", "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2"),
    *("neon_bf16", "neon_dot", "neon", "torch"),
)
"""Choices of kernels: the best variant that the CPU has, one variant of the native kernels, or plain PyTorch."""
SPECULATE = ("auto", "suffix", "mtp", "off")
"""Choices of guesses besides those of a draft model."""
LEVELS = ("debug", "info", "warning", "error")
OTHER_VARIABLES = ("TENUTO_CACHE", "TENUTO_URL")
"""Environment variables that set no option: the directory of models, and the URL of a client's server."""

_REPLICA = re.compile(r"http://[^/?#@\s]+")
_STORE = re.compile(r"(?:s3|gs|az)://[^/\s]+(?:/\S*)?|file:///\S+")
_STORES = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///DIRECTORY"

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on what a tenant has at any one time; `None`: unlimited. `turns`: open turns; `queued`: open turns that
    wait for a busy session. `sessions`: open sessions; `pinned`: pinned open sessions; `tokens`: committed tokens of
    all open sessions. `units`: pages and state slots that its sessions keep on the device; once it is reached, new
    turns make idle sessions leave the device. `journal_bytes`: approximate size in the journal. Memory and journal
    entries that sessions share count for each of them. A session that has reached `session_units` or
    `session_journal_bytes` accepts no more turns."""

    turns: Count | None = None
    queued: Count | None = None
    sessions: Count | None = None
    pinned: Count | None = None
    tokens: Count | None = None
    units: Count | None = None
    journal_bytes: Count | None = None
    session_units: Count | None = None
    session_journal_bytes: Count | None = None


def _tenant_weights(name: str, given: Iterable[Iterable[Any]]) -> tuple[tuple[str, float], ...]:
    """Returns tenants' weights as a tuple of pairs. Raises `ConfigError`."""
    try:
        pairs = [(tenant, weight) for tenant, weight in given]
    except (TypeError, ValueError):
        raise ConfigError(f"{name} is {shown(given)}; allowed: pairs of a tenant and its weight") from None
    return tuple(
        (tenant, WEIGHTS.check(f"the weight of tenant {tenant!r}", each, ConfigError)) for tenant, each in pairs
    )


def shared_tier_url(name: str, given: object) -> str | None:
    """Returns the URL of an object store; `None` for "none". Raises `ConfigError`, whose message never has what may be
    credentials."""
    if given is None or given == "none":
        return None
    if not isinstance(given, str):
        raise ConfigError(f"{name} is {shown(given)}; allowed: {_STORES}, or none")
    if set("@?#") & set(given):
        raise ConfigError(
            f"{name} is a URL with a user, a query or a fragment; allowed: {_STORES}; credentials come from the "
            "environment"
        )
    if not _STORE.fullmatch(given):
        raise ConfigError(f"{name} is {shown(given)}; allowed: {_STORES}, or none")
    return given


def _speculate(name: str, given: object) -> str:
    """Returns one of `SPECULATE` or the name of a model. Raises `ConfigError`."""
    if not isinstance(given, str) or not given.strip():
        raise ConfigError(f"{name} is {shown(given)}; allowed: {', '.join(SPECULATE)}, or the name or path of a model")
    return given.lower() if given.lower() in SPECULATE else given


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The options of an engine."""

    context_length: int = option(8192, "Most tokens of a session; capped at the model's if not given.", _COUNT)
    max_running: int = option(32, "Most turns in one step.", _COUNT, names={"cli": "--max-running-requests"})
    max_sessions: int = option(100_000, "Most open sessions.", _COUNT)
    max_queued: int = option(10_000, "Most turns that wait for a step.", _COUNT, names={"cli": "--max-queued-requests"})
    token_budget: int = option(
        1024, "Most tokens one step computes; more than max_running.", _COUNT, names={"cli": "--chunked-prefill-size"}
    )
    mixed_budget: int = option(
        256,
        "Most tokens of a step of several turns, besides one token of each.",
        _COUNT,
        names={"cli": "--mixed-chunk-size"},
    )
    overlap: int = option(0, "1: plan a step while the previous one is computed.", Bounds(0, 1))
    speculate: str = option(
        "auto",
        "Guess tokens, and compute them ahead: those that repeat what was said before where that changes no token"
        " (auto), or always (suffix); those of the model's own head for that (mtp); none (off); or also what a draft"
        " model says, by its name or path.",
        _speculate,
    )
    lookahead: int = option(0, "Most tokens a proposer may guess ahead of a turn.", _SIZE, internal="speculate decides")
    aging_seconds: float = option(10.0, "A turn gains one priority for every such wait.", SECONDS)
    checkpoint_interval: int = option(512, "Tokens of a prefill per checkpoint, rounded up to whole pages.", _COUNT)
    checkpoint_share: float = option(0.8, "Share of each pool for checkpoints that only save work.", Bounds(0.0, 1.0))
    prefix_cache: bool = option(
        True,  # noqa: FBT003 - the default
        "Turns start from what any session of their tenant, closed ones included, has in memory of the same tokens.",
        names={"cli": " /--disable-radix-cache"},
    )
    host_tier: int = option(
        0, "Host memory for sessions that have to leave the device: bytes, or a size such as 4GiB. 0: none.", parse_size
    )
    disk_tier: str = option(
        "", "Directory for sessions that host memory cannot hold. none: they are computed again.", parse_directory
    )
    disk_tier_size: int = option(0, "Most bytes in it, or a size such as 4GiB. 0: no limit.", parse_size)
    checkpoint_rate: int = option(
        2**28,
        "Most bytes a second of sessions' state written to the disk tier while a server with a journal or of a fleet"
        " runs, or a size such as 64MiB. 0: it is written only when the server ends.",
        parse_size,
    )
    snapshot_seconds: float = option(
        30.0, "Most time to write memory to the disk tier when a server with a journal ends.", Bounds(0.0, 86400.0)
    )
    tenant_weights: tuple[tuple[str, float], ...] = option(
        (),
        "Tenants' relative shares of rows and prefill tokens; 1 for others.",
        _tenant_weights,
        internal="the key file has them",
    )
    draft_timeout: float = option(60.0, "Seconds after its last change until a draft is dropped.", SECONDS)
    audit_every: int = option(
        1000, "Recount all memory every so many steps, a little at each. 0: only on demand.", _SIZE
    )
    strict: bool = option(default=False, description="Recount all memory after every step, and log every recount.")

    @property
    def draft_model(self) -> str | None:
        """The name or path of the draft model; `None` without one."""
        return None if self.speculate in SPECULATE else self.speculate

    def __post_init__(self) -> None:
        check_options(self, ConfigError)
        if self.token_budget <= self.max_running:
            raise ConfigError(
                f"token_budget is {self.token_budget}; allowed: more than max_running ({self.max_running}), "
                "so that prefills progress beside decodes"
            )


class EngineOptions(TypedDict, total=False):
    """Fields of `EngineConfig`, all optional."""

    context_length: int
    max_running: int
    max_sessions: int
    max_queued: int
    token_budget: int
    mixed_budget: int
    overlap: int
    speculate: str
    lookahead: int
    aging_seconds: float
    checkpoint_interval: int
    checkpoint_share: float
    prefix_cache: bool
    host_tier: int
    disk_tier: str
    disk_tier_size: int
    checkpoint_rate: int
    snapshot_seconds: float
    tenant_weights: tuple[tuple[str, float], ...]
    draft_timeout: float
    audit_every: int
    strict: bool


def engine_config(
    given: EngineOptions, max_context: int | None = None, defaults: EngineOptions | None = None
) -> EngineConfig:
    """Resolves the configuration. `defaults` replace those of `EngineConfig`; of these, `max_running` yields to a
    smaller `token_budget` that is given. The default context length is capped at the model's, `max_context`. Raises
    `ConfigError`."""
    unknown = given.keys() - EngineOptions.__annotations__.keys()
    if unknown:
        raise ConfigError(f"unknown engine options {sorted(unknown)}; allowed: {sorted(EngineOptions.__annotations__)}")
    usual: EngineOptions = {**defaults} if defaults is not None else {}
    if "max_running" in usual and "token_budget" in given:
        usual["max_running"] = max(1, min(usual["max_running"], given["token_budget"] - 1))
    config = EngineConfig(**(usual | given))
    if max_context is None or config.context_length <= max_context:
        return config
    if "context_length" not in given:
        return replace(config, context_length=max_context)
    raise ConfigError(f"context_length is {config.context_length}; allowed: at most the model's {max_context} tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Settings for loading a model and creating its engine; the first message to an engine process. Raises
    `ConfigError` if `config` is invalid for every model."""

    model: str = option(
        DEFAULT_MODEL,
        f"{DEFAULT_MODEL}, a .gguf file, a Hugging Face directory or a hub id.",
        names={"cli": "--model-path"},
    )
    device: str = option("cpu", "cpu, cuda, or another device PyTorch knows.")
    dtype: str | None = option(
        None,
        "If not given, native kernels take weights as they are stored; PyTorch computes in float32 on CPUs, in bfloat16"
        " elsewhere.",
        ("float32", "bfloat16", "float16"),
    )
    memory: int | float | None = option(
        None,
        "For the state of sessions: bytes, a size such as 4GiB, or a share of the device's memory such as 0.5; by"
        " default, what is free.",
        parse_memory,
    )
    page_size: int = option(32, "Token slots a page of memory.", Bounds(1, 2**20))
    kernels: str = option("auto", "What computes: native kernels for CPUs, or PyTorch.", KERNELS)
    kv_cache_dtype: str = option(
        "auto", "Keys and values in memory: 16 bits on CPUs, or half of it (native kernels only).", ("auto", "int8")
    )
    tensor_parallel: int = option(
        1,
        "Processes that compute the model together, each on its own device, or on the CPU with its share of cores.",
        Bounds(1, 64),
        names={"cli": ("--tp-size", "--tp", "--tensor-parallel-size")},
    )
    share_weights: bool = option(
        default=False,
        description="Have one copy of the packed weights for all processes: a file in the cache (native kernels only).",
    )
    lora_modules: tuple[str, ...] = option(
        (), "An adapter (LoRA) to load, as NAME=PATH of a directory that PEFT wrote. May be repeated."
    )
    journal: str | None = option(
        None, "File that keeps committed sessions for the next process that is given it. none: they end.", parse_path
    )
    fleet: str | None = option(
        None,
        "PostgreSQL database of a fleet, as postgresql://USER@HOST/NAME, whose replicas share all sessions.",
        parse_path,
        secret=True,
    )
    advertise: str | None = option(None, "URL at which the other replicas of the fleet reach this one.", parse_path)
    fleet_lease: float = option(
        1.5, "Seconds after its last heartbeat until other replicas take over this one's sessions.", Bounds(0.5, 60.0)
    )
    shared_tier: str | None = option(
        None,
        "Object store to which the replicas of a fleet copy what their disk tiers save, for those that take sessions"
        f" over on other machines: {_STORES}.",
        shared_tier_url,
    )
    log_level: str = option("info", "What is logged, at least.", LEVELS)
    config: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        check_options(self, ConfigError)
        config = engine_config(self.config)
        if len(self.adapters) < len(self.lora_modules):
            raise ConfigError("lora_modules have a name twice; allowed: different names")
        if (self.fleet is None) != (self.advertise is None):
            raise ConfigError("fleet and advertise are given alone; allowed: both, or neither")
        if self.fleet is not None and self.journal is not None:
            raise ConfigError("fleet and journal are given; allowed: one of them: a fleet's database has the sessions")
        if self.shared_tier is not None and (self.fleet is None or not config.disk_tier):
            raise ConfigError("shared_tier is given without fleet and disk_tier; allowed: with both")
        if self.advertise is not None and not _REPLICA.fullmatch(self.advertise):
            raise ConfigError(f"advertise is {shown(self.advertise)}; allowed: a URL such as http://10.0.0.1:8000")

    @property
    def adapters(self) -> dict[str, str]:
        """The directories of adapters by name. Raises `ConfigError`."""
        pairs = [module.partition("=") for module in self.lora_modules]
        for module, (name, _, path) in zip(self.lora_modules, pairs, strict=True):
            if not name or not path:
                raise ConfigError(f"lora_modules has {shown(module)}; allowed: NAME=PATH")
        return {name: path for name, _, path in pairs}

    @property
    def snapshot_seconds(self) -> float:
        """The time that the engine may take to write memory to disk when it is closed."""
        config = engine_config(self.config)
        outlived = self.journal is not None or self.fleet is not None
        return config.snapshot_seconds if outlived and config.disk_tier else 0.0


def user_path(path: str) -> Path:
    """Expands a leading `~`. Raises `ConfigError` if the home directory is not known."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{path!r} begins with ~, but there is no home directory: set HOME") from None


def variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the non-empty variables that set options of the server: all `TENUTO_*` except `OTHER_VARIABLES`."""
    return {
        name: text
        for name, text in environ.items()
        if name.startswith("TENUTO_") and text and name not in OTHER_VARIABLES
    }


def allows_http(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the usual variables of object stores allow connections without TLS."""
    names = (f"{store}_ALLOW_HTTP" for store in ("AWS", "GOOGLE", "AZURE"))
    return any(environ.get(name, "").lower() in ("1", "true", "yes", "on") for name in names)


_OTLP_EXPORTERS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


def trace_exporters(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Returns the names under which OpenTelemetry's packages register the exporters of traces that its standard
    variables ask for: those of `OTEL_TRACES_EXPORTER`, or OTLP's if only an endpoint is set. Without these variables it
    is empty. Raises `ConfigError` for a protocol of OTLP that has no exporter.

    Source: opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables."""
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    asked = environ.get("OTEL_TRACES_EXPORTER") or ("otlp" if any(map(environ.get, endpoints)) else "none")
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ()
    named = [name.strip() for name in asked.split(",")]
    return tuple(_otlp_exporter(environ) if name == "otlp" else name for name in named if name not in ("", "none"))


def _otlp_exporter(environ: Mapping[str, str]) -> str:
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next(filter(None, map(environ.get, names)), "http/protobuf")
    if protocol not in _OTLP_EXPORTERS:
        raise ConfigError(f"{names[1]} is {shown(protocol)}; allowed: {', '.join(_OTLP_EXPORTERS)}")
    return _OTLP_EXPORTERS[protocol]


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the directory of downloaded models and compiled kernels: `$TENUTO_CACHE`, else `tenuto` in
    `$XDG_CACHE_HOME` or `~/.cache`. If that does not exist and cannot be created (no home, or a read-only one), it is
    `tenuto-` and the user id in the system's temporary directory. Raises `ConfigError` if another user owns it."""
    return lasting_cache_dir(environ) or _private(Path(tempfile.gettempdir()) / f"tenuto-{os.getuid()}")


def lasting_cache_dir(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the directory of `cache_dir`, or `None` if that is a temporary one."""
    own = environ.get("TENUTO_CACHE")
    if own:
        return user_path(own)
    with suppress(RuntimeError, PermissionError):  # there is no home directory, or it belongs to another user
        base = environ.get("XDG_CACHE_HOME")
        usual = (Path(base) if base else Path.home() / ".cache") / "tenuto"
        if usual.exists() or _can_make(usual):
            return usual
    return None


def cache_advice() -> str:
    """Returns what users should know about `cache_dir` if it is a temporary directory, otherwise ""."""
    lasts = lasting_cache_dir() is not None
    return "" if lasts else f"{cache_dir()} is temporary, without a home directory; set TENUTO_CACHE to another"


def _can_make(directory: Path) -> bool:
    there = next(parent for parent in directory.absolute().parents if parent.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _private(directory: Path) -> Path:
    """Creates a directory that only its owner may use. Raises `ConfigError` if another user has created it first."""
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{directory} is not a directory of this user alone: set TENUTO_CACHE to one, or remove it")
    return directory
