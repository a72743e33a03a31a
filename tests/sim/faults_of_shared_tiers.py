"""Faults of the shared tier, planted one at a time: worlds of replicas with one (`tests.sim.fleets`) must fail with
each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import pytest

from tenuto.base.views import SessionKey
from tenuto.runtime.mirror import Mirror
from tenuto.runtime.shared_tier import SharedTier
from tests.sim.faults_of_fleets import Plant, look, saved_state_that_is_not_compared


def listings_that_are_written_before_their_files(patch: pytest.MonkeyPatch) -> None:
    each = Mirror._each

    def reversed_each(mirror: Mirror, do: Callable[..., None], some: Iterable[str]) -> None:
        if do == mirror._copy_file:
            mirror._lengths.update(dict.fromkeys(some, 0))
        else:
            each(mirror, do, some)

    patch.setattr(Mirror, "_each", reversed_each)


def files_that_are_removed_while_others_need_them(patch: pytest.MonkeyPatch) -> None:
    def end_uses(mirror: Mirror, names: Iterable[str]) -> None:
        for name in names:
            mirror._give_up(name)

    patch.setattr(Mirror, "_end_uses", end_uses)


def files_that_are_removed_before_listings(patch: pytest.MonkeyPatch) -> None:
    remove = Mirror._remove

    def files_first(mirror: Mirror) -> None:
        mirror._unlisted, mirror._unused = mirror._unused, mirror._unlisted
        try:
            remove(mirror)
        finally:
            mirror._unlisted, mirror._unused = mirror._unused, mirror._unlisted

    patch.setattr(Mirror, "_remove", files_first)


def sessions_that_stay_when_they_are_closed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Mirror, "_unlist", lambda *_: None)


def failures_after_which_nothing_is_tried_again(patch: pytest.MonkeyPatch) -> None:
    copy = Mirror._copy

    def copied(mirror: Mirror, sessions: set[SessionKey]) -> None:
        mine = set(sessions)
        sessions.clear()
        copy(mirror, mine)

    patch.setattr(Mirror, "_copy", copied)


def objects_that_vanish_and_nobody_misses(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Mirror, "_recheck", lambda _: None)


def objects_that_are_removed_though_they_are_needed(patch: pytest.MonkeyPatch) -> None:
    tidy = SharedTier.tidy

    def tidied(tier: SharedTier, _: Callable[[Collection[int]], Collection[int]]) -> None:
        tidy(tier, lambda _: set())

    patch.setattr(SharedTier, "tidy", tidied)


FAULTS: dict[Plant, int] = {
    listings_that_are_written_before_their_files: 0,
    files_that_are_removed_while_others_need_them: 0,
    files_that_are_removed_before_listings: 22,
    sessions_that_stay_when_they_are_closed: 0,
    failures_after_which_nothing_is_tried_again: 1,
    objects_that_vanish_and_nobody_misses: 7,
    objects_that_are_removed_though_they_are_needed: 0,
    saved_state_that_is_not_compared: 33,
}
"""The faults, each with a world that fails with it. `python -m tests.sim.faults_of_shared_tiers` looks for such
worlds."""


if __name__ == "__main__":
    look(FAULTS, 60, shared=True)
