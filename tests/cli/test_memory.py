from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tenuto.base.errors import ConfigError
from tenuto.cli.memory import read_memory, read_size
from tests.cli.test_cli import run

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1048576", 2**20),
        ("1", 1),
        ("4GiB", 4 * 2**30),
        (" 4 GiB ", 4 * 2**30),
        ("1.5MiB", 3 * 2**19),
        ("2kB", 2000),
        ("3GB", 3 * 10**9),
        ("2TiB", 2**41),
        ("1.0", MACHINE),
        ("0.5", MACHINE // 2),
        (".25", MACHINE // 4),
    ],
)
def test_memory_is_given_in_bytes_as_a_size_or_as_a_share(text: str, expected: int) -> None:
    assert read_memory(text, "cpu") == expected
    assert read_memory(text, "cpu:0") == expected


@pytest.mark.parametrize(
    "text", ["", "0", "0.0", "0GiB", "-1", "1.5", "4G", "4gib", "half", "50%", "nan", "1e9", "4 GiB x", "0.5GiB0"]
)
def test_what_is_no_amount_of_memory_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match=r"memory is .*allowed"):
        read_memory(text, "cpu")


def test_a_share_of_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="no device"):
        read_memory("0.5", "nonsense")


def test_a_share_of_the_machine_is_known_without_pytorch() -> None:
    code = (
        "import sys; from tenuto.cli.memory import read_memory; read_memory('0.5', 'cpu'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_server_says_what_it_takes_for_memory() -> None:
    done = run("serve", "--model", "witness", "--memory", "lots")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "4GiB" in done.stderr


@pytest.mark.parametrize(("text", "size"), [("0", 0), ("123", 123), ("4GiB", 4 << 30), ("1.5 kB", 1500)])
def test_sizes_of_tiers_may_be_nothing(text: str, size: int) -> None:
    assert read_size("host_tier", text) == size


@pytest.mark.parametrize("text", ["", "-1", "0.5", "many", "4 GiX"])
def test_what_is_no_size_is_refused_by_the_name_of_its_option(text: str) -> None:
    with pytest.raises(ConfigError, match="disk_tier_size"):
        read_size("disk_tier_size", text)
