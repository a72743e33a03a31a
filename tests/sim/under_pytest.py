"""`python -m tests.sim.under_pytest NAME TEST` plants the change called NAME and runs a test under pytest, for tests
whose fixtures make models."""

from __future__ import annotations

import sys

import pytest

from tests.sim.everything import everything
from tests.sim.planted import plant

if __name__ == "__main__":
    plant(everything()[sys.argv[1]])
    sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", sys.argv[2]]))
