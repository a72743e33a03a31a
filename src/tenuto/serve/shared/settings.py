"""Settings of the edge, and its API keys. Both are resolved once, before the server listens."""

from __future__ import annotations

import ipaddress
import re
import secrets
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import msgspec
import re2

from tenuto.base.checks import MAX_COUNT, MAX_SECONDS, Bounds, check_options, option, shown
from tenuto.base.config import WEIGHTS, Limits, user_path
from tenuto.base.errors import ConfigError
from tenuto.base.fleet_views import TenantUse
from tenuto.base.parsing import MAX_BYTES, parse_path, parse_ttl

TENANT_PATTERN = r"[A-Za-z0-9_-]{1,32}"
BODY_BYTES_A_SECOND = 1024
"""The lowest rate at which a body may arrive, after `ServeSettings.body_seconds`."""
DAY = 86_400.0
"""The default TTL in seconds, longer than most breaks in a conversation. Idle sessions cost little, since their memory
is reclaimed first."""


def line_rule(expression: str) -> re2._Regexp:
    """Compiles an expression of `volatile_line`, which matches in linear time. Raises `ConfigError`."""
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(expression, options)
    except re2.error as error:
        raise ConfigError(
            f"volatile_line {expression!r} is no regular expression of RE2: {error.args[0].decode()}"
        ) from None


class KeySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of a key file: the `key`, or its `sha256` in hex, so that the file holds no secret. `weight`: the
    tenant's share of rows and prefill tokens relative to others; 1 if no entry of the tenant sets it."""

    tenant: str
    key: str | None = None
    sha256: str | None = None
    admin: bool = False
    weight: float | None = None
    limits: Limits = Limits()


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[KeySettings]


OF_FLEETS = TenantUse.__struct_fields__
"""The limits that hold in a fleet as a whole."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of a request."""

    name: str
    admin: bool = False
    limits: Limits = field(default_factory=Limits)


EVERYONE = Tenant("default", admin=True)
"""The tenant of all requests to a server without keys."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Tenants by key. Without keys, all callers are the same tenant, with admin rights. `weights`: see
    `EngineConfig.tenant_weights`."""

    by_digest: dict[bytes, Tenant] = field(default_factory=dict)
    weights: tuple[tuple[str, float], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.by_digest)

    @property
    def limited(self) -> list[str]:
        """The names of tenants with limits that hold in a fleet as a whole."""
        tenants = self.by_digest.values()
        return sorted(
            {each.name for each in tenants if any(getattr(each.limits, name) is not None for name in OF_FLEETS)}
        )

    def tenant(self, key: str | None) -> Tenant | None:
        """Returns the tenant with this key, or `None`. Keys are looked up by their digests, so that timing reveals
        nothing about them."""
        if not self.by_digest:
            return EVERYONE
        return self.by_digest.get(sha256(key.encode()).digest()) if key is not None else None

    def named(self, name: str) -> Tenant | None:
        """Returns the tenant of this name, or `None`."""
        tenants = self.by_digest.values() if self.by_digest else (EVERYONE,)
        return next((each for each in tenants if each.name == name), None)

    @staticmethod
    def of(entries: list[KeySettings]) -> Keys:
        """Builds the keys from a key file's entries. Raises `ConfigError`."""
        found: dict[bytes, Tenant] = {}
        for entry in entries:
            digest = _digest(entry)
            if digest in found:
                raise ConfigError(f"two entries have the same key, one of them for tenant {entry.tenant!r}")
            found[digest] = Tenant(_tenant_name(entry.tenant), entry.admin, entry.limits)
        return Keys(found, _weights(entries))


def _digest(entry: KeySettings) -> bytes:
    """Returns the digest of an entry's key. Raises `ConfigError`, whose message shows no part of the key."""
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
                f"tenant {entry.tenant!r} has weights {found[entry.tenant]:g} and {weight:g}; allowed: one per tenant"
            )
    return tuple(found.items())


def _tenant_name(name: str) -> str:
    if not re.fullmatch(TENANT_PATTERN, name):
        raise ConfigError(f"tenant is {name!r}; allowed: 1 to 32 letters, digits, - and _")
    return name


def read_keys(path: Path | None, api_key: str | None, admin_key: str | None) -> Keys:
    """Reads keys from a TOML file of `[[keys]]` tables, and adds the two given directly. Raises `ConfigError`."""
    entries: list[KeySettings] = []
    if path is not None:
        try:
            entries = msgspec.toml.decode(path.read_bytes(), type=_KeyFile).keys
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"the key file {path} cannot be used: {error}") from error
        if not entries:
            raise ConfigError(f"the key file {path} has no [[keys]]; the server would admit everyone")
    if api_key is not None:
        entries.append(KeySettings(tenant="default", key=api_key))
    if admin_key is not None:
        entries.append(KeySettings(tenant="admin", key=admin_key, admin=True))
    return Keys.of(entries)


MIN_SECRET = 16
"""The fewest characters of a fleet's secret."""


def read_secret(file: str | None) -> str | None:
    """Returns the secret in a file, if there is one. Raises `ConfigError`, whose message shows no part of it."""
    if file is None:
        return None
    try:
        secret = user_path(file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file with the fleet's secret, {file}, cannot be used: {error}") from None
    if not re.fullmatch(rf"[!-~]{{{MIN_SECRET},}}", secret):
        raise ConfigError(
            f"the secret in {file} cannot be sent; allowed: {MIN_SECRET} or more letters of visible ASCII, no spaces"
        )
    return secret


_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#@\s]+", re.IGNORECASE)
"""An origin of web pages (RFC 6454), or `*`."""
_COUNT = Bounds(1, MAX_COUNT)
_BYTES = Bounds(1, MAX_BYTES)
_ARRIVAL = Bounds(0.1, 3600.0)


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The server's address, keys and limits."""

    host: str = option("127.0.0.1", "Address to listen on; addresses that other machines can reach need an API key.")
    port: int = option(8000, "Port to listen on; 0 picks a free one.", Bounds(0, 65535))
    served_model_name: tuple[str, ...] = option(
        (), "Name of the model for clients, by default its own. May be repeated; answers have the first name."
    )
    any_model_name: bool = option(
        default=False, description="Accept any model name in requests, for clients with a fixed name."
    )
    api_key: str | None = option(
        None, "Key that clients must send; as TENUTO_API_KEY it does not show in lists of processes.", secret=True
    )
    admin_api_key: str | None = option(None, "Key with all rights; better given as TENUTO_ADMIN_API_KEY.", secret=True)
    keys: str | None = option(None, "A TOML file of keys, tenants and limits.", parse_path)
    allowed_origins: tuple[str, ...] = option(
        (),
        "Origin whose pages may use the server from a browser, as https://app.example; * for all. May be repeated.",
    )
    session_ttl: float | None = option(
        DAY,
        "Seconds a session without a turn stays open, unless its request sets them; 0 or none: forever if its"
        " client named it, else for a day. A fork or trim inherits the TTL of its source.",
        parse_ttl,
    )
    find_runs: bool = option(
        default=True,
        description="Keep the session of a conversation whose client resends it and names itself, to find it again.",
    )
    keep_volatile_lines: bool = option(
        default=False, description="Leave lines in system messages that clients are known to change by request."
    )
    volatile_line: tuple[str, ...] = option(
        (), "Regular expression of more lines to leave out at either end of system messages. May be repeated."
    )
    drain_seconds: float = option(5.0, "Seconds that turns may continue after SIGTERM.", Bounds(0.0, MAX_SECONDS))
    unread_seconds: float = option(
        30.0,
        "Seconds without a read after which a client counts as gone; its system may announce reads only in"
        " pieces of 64 KiB or more.",
        Bounds(0.1, MAX_SECONDS),
    )
    max_body_bytes: int = option(32 * 2**20, "Maximum size of a request's body.", _BYTES)
    max_bodies_bytes: int = option(2**30, "Maximum size of the bodies of all open requests.", _BYTES)
    max_state_bytes: int = option(
        2**34, "Maximum size of all sessions being imported with their state, in temporary files.", _BYTES
    )
    max_turns: int = option(2048, "Maximum number of open turns of all tenants.", _COUNT)
    max_connections: int = option(4096, "Maximum number of open connections.", _COUNT)
    header_seconds: float = option(10.0, "Seconds a request's headers may take to arrive.", _ARRIVAL)
    body_seconds: float = option(30.0, "Seconds a request's body may take to arrive, plus one for every KiB.", _ARRIVAL)
    keep_alive_seconds: int = option(5, "Seconds a connection may be idle between requests.", Bounds(1, 3600))
    fleet_secret_file: str | None = option(
        None, "File with the secret of the fleet's replicas; without one, it is in their database.", parse_path
    )
    fleet_rebalance: bool = option(
        default=True, description="Move sessions to replicas that have much less to do, to spread load."
    )
    public_metrics: bool = option(default=False, description="Show /metrics without an admin key.")
    tenants: Keys = field(init=False, repr=False)
    fleet_secret: str | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_options(self, ConfigError)
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins has {shown(origin)}; allowed: origins such as https://app.example, or *"
                )
        for rule in self.volatile_line:
            line_rule(rule)
        origins = tuple(map(str.lower, self.allowed_origins))  # as browsers send them
        object.__setattr__(self, "allowed_origins", origins)
        path = user_path(self.keys) if self.keys is not None else None
        object.__setattr__(self, "tenants", read_keys(path, self.api_key, self.admin_api_key))
        object.__setattr__(self, "fleet_secret", read_secret(self.fleet_secret_file))
        if not self.tenants and not _is_loopback(self.host):
            raise ConfigError(
                f"host is {self.host}, which others can reach; allowed without an API key: 127.0.0.1, ::1, localhost"
            )

    def ttl(self, asked: float | None, *, named: bool) -> float | None:
        """Returns the TTL of a session whose request asks for `asked`. A session that its client did not name cannot be
        found again once the client is gone, so it always has a TTL."""
        if asked is not None:
            return asked
        return self.session_ttl if self.session_ttl is not None or named else DAY


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def new_session_id() -> str:
    """Returns a session id that cannot be guessed."""
    return f"session-{secrets.token_hex(12)}"
