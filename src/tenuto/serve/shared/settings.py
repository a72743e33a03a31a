"""The settings of the edge and its API keys: resolved once, before the server listens."""

from __future__ import annotations

import ipaddress
import re
import secrets
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import msgspec

from tenuto.base.checks import seconds, shown
from tenuto.base.config import WEIGHTS, Limits
from tenuto.base.errors import ConfigError

TENANT_PATTERN = r"[A-Za-z0-9_-]{1,32}"
BODY_BYTES_A_SECOND = 1024
"""The lowest rate at which a body may arrive, after `ServeSettings.body_seconds`."""
DAY = 86_400.0
"""In seconds. Idle sessions cost little, since their memory is reclaimed first; most breaks in a conversation are
shorter."""


class KeySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of a key file: the `key`, or its `sha256` in hex, so that the file holds no secret. `weight`: its
    tenant's share of rows and prefill tokens relative to others; 1 if no entry of the tenant has one."""

    tenant: str
    key: str | None = None
    sha256: str | None = None
    admin: bool = False
    weight: float | None = None
    limits: Limits = Limits()


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[KeySettings]


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of a request."""

    name: str
    admin: bool = False
    limits: Limits = field(default_factory=Limits)


EVERYONE = Tenant("default", admin=True)
"""Without keys."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The tenants by key. Without keys, everyone is the same tenant, with admin rights. `weights`: as in
    `EngineConfig.tenant_weights`."""

    by_digest: dict[bytes, Tenant] = field(default_factory=dict)
    weights: tuple[tuple[str, float], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.by_digest)

    def tenant(self, key: str | None) -> Tenant | None:
        """The tenant with this key, or `None`. Keys are looked up by their digests, so that timing reveals nothing
        about them."""
        if not self.by_digest:
            return EVERYONE
        return self.by_digest.get(sha256(key.encode()).digest()) if key is not None else None

    @staticmethod
    def of(entries: list[KeySettings]) -> Keys:
        """Raises `ConfigError`."""
        found: dict[bytes, Tenant] = {}
        for entry in entries:
            digest = _digest(entry)
            if digest in found:
                raise ConfigError(f"two entries have the same key, one of them for tenant {entry.tenant!r}")
            found[digest] = Tenant(_tenant_name(entry.tenant), entry.admin, entry.limits)
        return Keys(found, _weights(entries))


def _digest(entry: KeySettings) -> bytes:
    """The digest of an entry's key. Error messages show no part of the key."""
    if (entry.key is None) == (entry.sha256 is None):
        raise ConfigError(f"the key of tenant {entry.tenant!r} needs either key or sha256")
    if entry.sha256 is not None:
        if not re.fullmatch(r"[0-9A-Fa-f]{64}", entry.sha256):
            raise ConfigError(f"the sha256 of tenant {entry.tenant!r} is malformed; allowed: 64 hexadecimal digits")
        return bytes.fromhex(entry.sha256)
    key = entry.key or ""
    if not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(f"the key of tenant {entry.tenant!r} cannot be sent; allowed: visible ASCII, no spaces")
    return sha256(key.encode()).digest()


def _weights(entries: list[KeySettings]) -> tuple[tuple[str, float], ...]:
    found: dict[str, float] = {}
    for entry in entries:
        if entry.weight is None:
            continue
        weight = WEIGHTS.check(f"the weight of tenant {entry.tenant!r}", entry.weight, ConfigError)
        if found.setdefault(entry.tenant, weight) != weight:
            raise ConfigError(
                f"tenant {entry.tenant!r} has weights {found[entry.tenant]:g} and {weight:g}; allowed: one, in any of"
                " its entries"
            )
    return tuple(found.items())


def _tenant_name(name: str) -> str:
    if not re.fullmatch(TENANT_PATTERN, name):
        raise ConfigError(f"tenant is {name!r}; allowed: 1 to 32 letters, digits, - and _")
    return name


def read_keys(path: Path | None, api_key: str | None, admin_key: str | None) -> Keys:
    """Keys from a TOML file of `[[keys]]` tables, and the two given directly. Raises `ConfigError`."""
    entries: list[KeySettings] = []
    if path is not None:
        try:
            entries = msgspec.toml.decode(path.read_bytes(), type=_KeyFile).keys
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"the key file {path} cannot be used: {error}") from error
        if not entries:
            raise ConfigError(f"the key file {path} has no [[keys]]; without any, everyone would be let in")
    if api_key is not None:
        entries.append(KeySettings(tenant="default", key=api_key))
    if admin_key is not None:
        entries.append(KeySettings(tenant="admin", key=admin_key, admin=True))
    return Keys.of(entries)


def read_ttl(text: str) -> float | None:
    """Seconds; `None` for "0" and "none". Raises `ConfigError`."""
    if text.strip().lower() == "none":
        return None
    try:
        return seconds("session_ttl", float(text), ConfigError) if float(text) else None
    except ValueError:
        raise ConfigError(f"session_ttl is {shown(text)}; allowed: seconds, or 0 or none for no limit") from None


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """How the server listens, and what clients may ask of it.

    `served_names`: names that clients may give the model, answers have the first; by default its own.
    `any_model_name`: clients may call it anything. `max_body_bytes`: per request,
    `max_bodies_bytes`: of all open requests together. `max_state_bytes`: of sessions that are imported with their
    state, one or all together; they go to temporary files. `max_turns`: open turns of all tenants. `max_connections`:
    open connections. `header_seconds`: until a request's headers are complete; `body_seconds`: until its body is, plus
    one second for every `BODY_BYTES_A_SECOND` received. `keep_alive_seconds`: between two requests of a connection.
    `session_ttl`: of sessions opened without a TTL, in seconds, `None` for never; a fork or trim inherits the TTL of
    its source. `drain_seconds`: how long turns may continue after SIGTERM before they are aborted. `unread_seconds`:
    how long a client may read nothing of its answer before it counts as gone. `public_metrics`: `/metrics` needs no
    admin key.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keys: Keys = field(default_factory=Keys)
    served_names: tuple[str, ...] = ()
    any_model_name: bool = False
    max_body_bytes: int = 32 * 2**20
    max_bodies_bytes: int = 2**30
    max_state_bytes: int = 2**34
    max_turns: int = 2048
    max_connections: int = 4096
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    keep_alive_seconds: int = 5
    session_ttl: float | None = DAY
    drain_seconds: float = 5.0
    unread_seconds: float = 30.0
    public_metrics: bool = False

    def __post_init__(self) -> None:
        seconds("unread_seconds", self.unread_seconds, ConfigError)
        if not self.keys and not _is_loopback(self.host):
            raise ConfigError(
                f"host is {self.host}, which others can reach; allowed without an API key: 127.0.0.1, ::1, localhost"
            )

    def ttl(self, asked: float | None, *, named: bool) -> float | None:
        """The TTL of a session whose request asks for `asked`. A session without a name of the client's choice cannot
        be found again once the client is gone, so it always has a TTL."""
        if asked is not None:
            return asked
        return self.session_ttl if self.session_ttl is not None or named else DAY


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def new_session_id() -> str:
    """A session id that cannot be guessed."""
    return f"session-{secrets.token_hex(12)}"


def hidden_session_id() -> str:
    """The id of a session that the edge opens for itself; no request can name it."""
    return f"~{secrets.token_hex(12)}"
