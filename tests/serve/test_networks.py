"""A fleet whose networks are cut: nobody waits for ever, and nothing that was acknowledged is lost."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.eventually import eventually
from tests.postgres import database
from tests.present import present
from tests.serve.killing_fleets import CUTS, disturb
from tests.serve.networks import networks, possible
from tests.serve.replicas import Replicas, replicas

pytestmark = pytest.mark.skipif(not possible(), reason="needs root and network namespaces (Linux, iproute2)")


@pytest.fixture(scope="module")
def fleet() -> Iterator[Replicas]:
    url = database()
    with (
        networks(3, url) as made,
        replicas(url, 3, "--model", "witness:0.005", "--context-length", "8192", lease=4, networks=made) as servers,
    ):
        yield servers


def test_acknowledged_turns_survive_cut_networks(fleet: Replicas) -> None:
    assert disturb(fleet, len(CUTS), seed=1, kinds=tuple(CUTS)).turns > 0


def test_a_stream_from_an_owner_that_only_its_peers_cannot_reach_breaks(fleet: Replicas) -> None:
    """The owner reaches the database, so its lease goes on."""
    one, two, _ = fleet.servers
    cables = present(fleet.networks)
    with one.client() as owner, two.client() as other:
        owner.post("/v1/sessions", json={"id": "cut"}).raise_for_status()
        body = {"input": [1, 2, 3], "max_new_tokens": 4000, "ignore_eos": True}
        with other.stream("POST", "/v1/sessions/cut/turns", json=body) as answer:
            lines = answer.iter_lines()
            next(line for line in lines if "delta" in line)
            cables.cut(0, "network")
            try:
                with pytest.raises(httpx.RemoteProtocolError):
                    list(lines)
                refused = other.get("/v1/sessions/cut")
                assert refused.status_code == 503
                assert other.get("/v1/sessions").status_code == 503
            finally:
                cables.mend(0, "network")
        eventually(lambda: other.get("/v1/sessions/cut").status_code == 200)
