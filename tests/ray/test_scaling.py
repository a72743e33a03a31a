"""How many replicas the autoscaling policy asks for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tenuto.ray.scaling import TARGET, by_load, load_of
from tests.serve.server import serving


def asked(replicas: int, **figures: list[float]) -> float:
    """Returns how many replicas the policy asks for, if each of `replicas` reports these figures."""
    metrics = {name: dict(enumerate(values)) for name, values in figures.items()}
    context: Any = SimpleNamespace(
        aggregated_metrics=metrics, current_num_replicas=replicas, target_num_replicas=replicas
    )
    return by_load(context)[0]


def test_rows_units_and_queues_ask_for_replicas() -> None:
    idle = {"rows": [0.0, 0.0], "units": [0.0, 0.0], "queue": [0.0, 0.0]}
    assert asked(2, **idle) == 0
    assert asked(2, **{**idle, "rows": [TARGET, TARGET]}) == pytest.approx(2)
    assert asked(2, **{**idle, "units": [1.0, 1.0]}) > 2
    assert asked(2, **{**idle, "rows": [1.0, 1.0], "queue": [1.0, 3.0]}) == pytest.approx(2 * 3 / TARGET)
    assert asked(2) == 2  # nobody has reported yet


def test_a_replica_that_has_not_reported_counts_as_the_others() -> None:
    assert asked(2, rows=[TARGET], units=[0.0], queue=[0.0]) == pytest.approx(2)


def test_the_load_is_that_of_a_server() -> None:
    with serving("--model", "witness:0.05", "--context-length", "2048", "--max-running", "2") as server:
        assert load_of(httpx.get(f"{server.url}/metrics").text, 2) == {"rows": 0, "units": 0, "queue": 0}
        with server.client() as http:
            for name in ("one", "two"):
                http.post("/v1/sessions", json={"id": name}).raise_for_status()
            body = {"input": [1, 2, 3], "max_new_tokens": 1000, "ignore_eos": True}
            with (
                http.stream("POST", "/v1/sessions/one/turns", json=body) as first,
                http.stream("POST", "/v1/sessions/two/turns", json=body) as second,
            ):
                lines = [each.iter_lines() for each in (first, second)]  # kept, since a stream ends with its reader
                for each in lines:
                    assert next(line for line in each if "delta" in line)
                load = load_of(httpx.get(f"{server.url}/metrics").text, 2)
        assert load["rows"] == 1
        assert load["queue"] == 0
