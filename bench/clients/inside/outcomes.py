"""A plugin of pytest that prints the outcome of each test, or the error of its fixtures, as a line of JSON."""

import json

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Prints an outcome."""
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        line = {"test": report.nodeid, "outcome": report.outcome, "detail": report.longreprtext[-1500:]}
        print(f"\n{json.dumps(line)}", flush=True)
