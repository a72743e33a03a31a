"""Clients of the OpenAI interface, and a check that nothing remains of their requests."""

from __future__ import annotations

from typing import Any

import httpx
from openai import OpenAI
from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from tests.eventually import eventually
from tests.present import present
from tests.serve.server import Server

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
GREEDY: dict[str, Any] = {"model": "witness", "temperature": 0}


def client_of(server: Server, **options: Any) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, **options)


def held(server: Server) -> dict[str, int]:
    """Returns the units held by turns and sessions, including hidden ones."""
    pools = httpx.get(f"{server.url}/audit", timeout=60).raise_for_status().json()["pools"]
    return {holder: units for pool in pools for holder, units in pool["by_holder"].items() if units}


def is_left(server: Server, before: dict[str, int]) -> None:
    """Checks that the same units are held again: every turn has ended and every hidden session is closed."""
    eventually(lambda: held(server) == before)


def close(server: Server, session: str) -> None:
    httpx.delete(f"{server.url}/v1/sessions/{session}", timeout=60).raise_for_status()


def usage_of(answer: Completion | ChatCompletion) -> CompletionUsage:
    return present(answer.usage)
