"""How the edge serves: resolved once, before anything listens."""

from __future__ import annotations

import ipaddress
import secrets
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import msgspec

from tenuto.base.errors import ConfigError

TENANT_PATTERN = r"^[A-Za-z0-9_-]{1,32}$"


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a tenant may have at once; `None`: as much as the server has. `turns` that have not ended, of which `queued`
    may wait for a session of theirs; open `sessions`; committed `tokens` in them."""

    turns: int | None = None
    queued: int | None = None
    sessions: int | None = None
    tokens: int | None = None


class KeySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of a key file: `key` itself, or its `sha256` in hex, so that the file holds no secret."""

    tenant: str
    key: str | None = None
    sha256: str | None = None
    admin: bool = False
    limits: Limits = Limits()


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[KeySettings]


@dataclass(frozen=True, slots=True)
class Tenant:
    """On whose account a request is made."""

    name: str
    admin: bool = False
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Keys:
    """Who holds which key. Without any, everyone is the one tenant, who may do everything."""

    by_digest: dict[bytes, Tenant] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.by_digest)

    def tenant(self, key: str | None) -> Tenant | None:
        """Whose `key` it is; `None` if nobody's. Keys are compared by their digests, so time tells nothing."""
        if not self.by_digest:
            return Tenant("default", admin=True)
        return self.by_digest.get(sha256(key.encode()).digest()) if key is not None else None

    @staticmethod
    def of(entries: list[KeySettings]) -> Keys:
        """Raises `ConfigError`."""
        found: dict[bytes, Tenant] = {}
        for entry in entries:
            if (entry.key is None) == (entry.sha256 is None):
                raise ConfigError(f"the key of tenant {entry.tenant!r} needs either key or sha256")
            try:
                digest = sha256(entry.key.encode()).digest() if entry.key else bytes.fromhex(entry.sha256 or "")
            except ValueError:
                raise ConfigError(f"the sha256 of tenant {entry.tenant!r} is not hexadecimal") from None
            if len(digest) != sha256().digest_size:
                raise ConfigError(f"the sha256 of tenant {entry.tenant!r} has {len(digest)} bytes; allowed: 32")
            if digest in found:
                raise ConfigError(f"two entries have the same key; one is that of tenant {entry.tenant!r}")
            found[digest] = Tenant(_tenant_name(entry.tenant), entry.admin, entry.limits)
        return Keys(found)


def _tenant_name(name: str) -> str:
    if not 1 <= len(name) <= 32 or not all(
        letter.isascii() and (letter.isalnum() or letter in "_-") for letter in name
    ):
        raise ConfigError(f"tenant is {name!r}; allowed: 1 to 32 letters, digits, - and _")
    return name


def read_keys(path: Path | None, api_key: str | None, admin_key: str | None) -> Keys:
    """Keys from a TOML file of `[[keys]]` tables, and those given by themselves. Raises `ConfigError`."""
    entries: list[KeySettings] = []
    if path is not None:
        try:
            entries = msgspec.toml.decode(path.read_bytes(), type=_KeyFile).keys
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"the key file {path} cannot be used: {error}") from error
    if api_key is not None:
        entries.append(KeySettings(tenant="default", key=api_key))
    if admin_key is not None:
        entries.append(KeySettings(tenant="admin", key=admin_key, admin=True))
    return Keys.of(entries)


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """`drain_seconds`: how long turns may go on after SIGTERM before they are aborted. `max_body_bytes`: of a request.
    `max_turns`: that have not ended, of all tenants. `session_ttl`: of sessions whose request names none, seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    keys: Keys = field(default_factory=Keys)
    served_name: str | None = None
    max_body_bytes: int = 32 * 2**20
    max_turns: int = 2048
    session_ttl: float | None = None
    drain_seconds: float = 5.0

    def __post_init__(self) -> None:
        if not self.keys and not _is_loopback(self.host):
            raise ConfigError(
                f"host is {self.host}, which others can reach; allowed without an API key: 127.0.0.1, ::1, localhost"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def new_session_id() -> str:
    """An id that cannot be guessed."""
    return f"session-{secrets.token_hex(12)}"
