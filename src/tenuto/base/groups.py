"""Memory groups: the kinds of memory that a model's layers need, and the size of each group's units."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tenuto.base.errors import ConfigError


class Kind(Enum):
    """The kind of memory that a group's layers keep of earlier tokens."""

    FULL = "full"
    SLIDING = "sliding"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers that share one kind of memory.

    `bytes_per_unit` is the size of one page (`page_size` token slots, all layers of the group) or of one state slot.
    `window` is the number of tokens a sliding layer attends to, the token itself included; 0 for the other kinds.
    `bytes_per_input` is what an executor keeps of a token that may be rejected, in all layers of a state group; see
    `plan.StateMoves`.
    """

    kind: Kind
    bytes_per_unit: int
    window: int = 0
    bytes_per_input: int = 0

    def __post_init__(self) -> None:
        if self.bytes_per_unit <= 0:
            raise ConfigError(f"a {self.kind.value} group has {self.bytes_per_unit} bytes a unit; allowed: at least 1")
        if (self.window > 0) != (self.kind is Kind.SLIDING):
            raise ConfigError(f"a {self.kind.value} group has window {self.window}; only sliding groups have one, >= 1")

    @property
    def paged(self) -> bool:
        return self.kind is not Kind.STATE


@dataclass(frozen=True, slots=True)
class MemorySpec:
    """All memory groups of a model and the page size they share (token slots per page)."""

    page_size: int
    groups: tuple[GroupSpec, ...]

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ConfigError(f"page_size is {self.page_size}; allowed: at least 1")
        if not self.groups:
            raise ConfigError("a model needs at least one memory group")
