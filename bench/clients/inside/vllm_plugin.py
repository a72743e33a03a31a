"""A plugin of pytest with which vLLM's tests of entrypoints talk to the server at `TENUTO_URL`.

The fixture that starts vLLM for them, `RemoteOpenAIServer`, is replaced by one that only knows that address. Modules of
vLLM are stand-ins, so tests of its Python objects fail. Tests that ask for a model's tokenizer or vocabulary get the
server's; the tokenizer is in the directory `TENUTO_TOKENIZER`.
"""

import os
import sys
import types
from typing import Any, Self

import anthropic
import openai
import requests
from stand_ins import stand_in, standing_in  # type: ignore[import-not-found]  # in this directory
from transformers import PreTrainedTokenizerFast

URL = os.environ["TENUTO_URL"]
USUAL: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 200}
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
        return openai.OpenAI(**USUAL | {"base_url": f"{URL}/v1"} | given)

    def get_async_client(self, **given: Any) -> openai.AsyncOpenAI:
        """Returns OpenAI's client for asyncio."""
        return openai.AsyncOpenAI(**USUAL | {"base_url": f"{URL}/v1"} | given)

    def get_async_client_anthropic(self, **given: Any) -> anthropic.AsyncAnthropic:
        """Returns Anthropic's client for asyncio."""
        return anthropic.AsyncAnthropic(**USUAL | {"base_url": URL} | given)


class ModelConfig:
    """The configuration of the server's model, whatever model a test names."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def get_vocab_size(self) -> int:
        """Returns the number of its tokens."""
        return int(requests.get(f"{URL}/tokenizer_info", timeout=60).json()["vocab_size"])


def get_tokenizer(*_: Any, **__: Any) -> Any:
    """Returns the server's tokenizer, whatever model a test names."""
    return PreTrainedTokenizerFast.from_pretrained(os.environ["TENUTO_TOKENIZER"])


stand_in("vllm", "torch", "huggingface_hub", "openai_harmony", "safetensors")
torch = standing_in("torch", [])
torch.iinfo = lambda _: types.SimpleNamespace(min=-(2**63), max=2**63 - 1)  # tests only ask for int64's
weights = standing_in("vllm.model_executor.model_loader.weight_utils", [])
weights.download_weights_from_hf = lambda name, **_: name
tokenizers = standing_in("vllm.tokenizers", [])
tokenizers.get_tokenizer = get_tokenizer
config = standing_in("vllm.config", [])
config.ModelConfig = ModelConfig
sys.modules |= {module.__name__: module for module in (torch, weights, tokenizers, config)}
utils = standing_in("tests.utils", [])
utils.RemoteOpenAIServer = RemoteOpenAIServer
sys.modules["tests.utils"] = utils
