"""A plugin of pytest with which vLLM's tests of entrypoints talk to the server at `TENUTO_URL`.

The fixture that starts vLLM for them, `RemoteOpenAIServer`, is replaced by one that only knows that address. Modules of
vLLM are stand-ins. So tests of its Python objects fail.
"""

import os
import sys
from typing import Any, Self

import anthropic
import openai
from stand_ins import stand_in, standing_in  # type: ignore[import-not-found]  # in this directory

URL = os.environ["TENUTO_URL"]
pytest_plugins = ["tests.entrypoints.conftest", "tests.entrypoints.openai.responses.conftest", "outcomes"]


class RemoteOpenAIServer:
    """The server; options that tests give it are ignored."""

    DUMMY_API_KEY = "none"
    url_root = URL

    def __init__(self, model: str, *_: Any, **__: Any) -> None:
        self.model = model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        """Returns the address of a path."""
        return "/".join([URL, *(part.strip("/") for part in parts if part)])

    def get_client(self, **given: Any) -> openai.OpenAI:
        """Returns OpenAI's client."""
        return openai.OpenAI(**{"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0, "timeout": 60} | given)

    def get_async_client(self, **given: Any) -> openai.AsyncOpenAI:
        """Returns OpenAI's client for asyncio."""
        return openai.AsyncOpenAI(
            **{"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0, "timeout": 60} | given
        )

    def get_async_client_anthropic(self, **given: Any) -> anthropic.AsyncAnthropic:
        """Returns Anthropic's client for asyncio."""
        return anthropic.AsyncAnthropic(**{"base_url": URL, "api_key": "none", "max_retries": 0, "timeout": 60} | given)


stand_in("vllm", "torch", "transformers", "huggingface_hub", "openai_harmony", "safetensors")
utils = standing_in("tests.utils", [])
utils.RemoteOpenAIServer = RemoteOpenAIServer
sys.modules["tests.utils"] = utils
