"""Options as people write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tenuto.base.errors import ConfigError
from tenuto.base.parsing import parse_memory, parse_path, parse_size, parse_ttl


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("1048576", 2**20),
        ("1", 1),
        ("4GiB", 4 * 2**30),
        (" 4 GiB ", 4 * 2**30),
        ("1.5MiB", 3 * 2**19),
        ("2kB", 2000),
        ("3GB", 3 * 10**9),
        ("2TiB", 2**41),
        ("1.0", 1.0),
        ("0.5", 0.5),
        (".25", 0.25),
        (2**20, 2**20),
        (0.5, 0.5),
        (None, None),
    ],
)
def test_memory_may_be_given_in_bytes_as_a_size_or_as_a_share(given: Any, expected: float | None) -> None:
    value = parse_memory("memory", given)
    assert (value, type(value)) == (expected, type(expected))
    assert parse_memory("memory", value) == value


@pytest.mark.parametrize(
    "given",
    [
        "",
        "0",
        "0.0",
        "0GiB",
        "-1",
        "1.5",
        "4G",
        "4gib",
        "half",
        "50%",
        "nan",
        "1e9",
        "4 GiB x",
        "0.5GiB0",
        0,
        1.5,
        True,
    ],
)
def test_an_invalid_amount_of_memory_is_refused_with_the_allowed_forms(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"memory is .*allowed"):
        parse_memory("memory", given)


@pytest.mark.parametrize(
    ("given", "size"), [("0", 0), ("123", 123), ("4GiB", 4 << 30), ("1.5 kB", 1500), (0, 0), (4096, 4096)]
)
def test_sizes_of_tiers_may_be_zero(given: Any, size: int) -> None:
    assert parse_size("host_tier", given) == size


@pytest.mark.parametrize("given", ["", "-1", "0.5", "many", "4 GiX", -1, 0.5, None, True])
def test_an_invalid_size_is_refused_by_the_name_of_its_option(given: Any) -> None:
    with pytest.raises(ConfigError, match="disk_tier_size"):
        parse_size("disk_tier_size", given)


@pytest.mark.parametrize(
    ("given", "expected"), [("60", 60.0), (" 0.5", 0.5), (7, 7.0), ("0", None), ("None", None), (0, None), (None, None)]
)
def test_a_ttl_is_seconds_or_none(given: Any, expected: float | None) -> None:
    assert parse_ttl("session_ttl", given) == expected


@pytest.mark.parametrize("given", ["", "e", "-1", "inf", False, [1]])
def test_an_invalid_ttl_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"session_ttl is .*; allowed: .*seconds, or none"):
        parse_ttl("session_ttl", given)


def test_a_path_may_be_text_a_path_object_or_the_word_none() -> None:
    assert [parse_path("journal", given) for given in ("a/b", Path("a/b"), "none", None)] == ["a/b", "a/b", None, None]
    with pytest.raises(ConfigError, match="journal is 3; allowed: a path, or none"):
        parse_path("journal", 3)
