"""SGLang's own test kits: `python sglang_kits.py URL TESTS MODEL KIT[:CLASS][::TEST] ... --without KIT::TEST ...`.

Runs kits against a server. Each KIT is a module in TESTS, SGLang's test package; of it one class or one test, or all
but those left out. Prints the outcome of each test as a line of JSON.
"""

import importlib
import json
import sys
import traceback
import types
import unittest
from typing import Any

import openai
import requests
from stand_ins import stand_in, standing_in  # type: ignore[import-not-found]  # in this directory

url, directory, model, *kits = sys.argv[1:]
at = kits.index("--without")
kits, without = kits[:at], kits[at + 1 :]


class Tokenizer:
    """The server's tokenizer."""

    bos_token_id = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        body: Any = {"prompt": text, "add_special_tokens": add_special_tokens}
        return list(requests.post(f"{url}/tokenize", json=body, timeout=60).json()["tokens"])


class Result(unittest.TestResult):
    """Prints outcomes."""

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        say(test, "passed", "")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802 - unittest's name
        say(test, "failed", "".join(traceback.format_exception(err[1])))

    addError = addFailure  # noqa: N815 - unittest's name

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802 - unittest's name
        say(test, "skipped", reason)


def say(test: unittest.TestCase, outcome: str, detail: str) -> None:
    """Prints an outcome."""
    kit, name = type(test).__module__.rpartition(".")[2], test.id().rpartition(".")[2]
    line = {"test": f"{kit}::{name}", "outcome": outcome, "detail": detail[-1500:]}
    print(f"\n{json.dumps(line)}", flush=True)  # kits print without ends of lines


stand_in("sglang", "torch", "transformers")
sys.modules |= {"sglang": standing_in("sglang", []), "sglang.test": standing_in("sglang.test", [directory])}
sys.modules["sglang.test.test_utils"] = standing_in("sglang.test.test_utils", [])  # the real one needs all of SGLang
fixtures = {
    "base_url": url,
    "process": types.SimpleNamespace(poll=lambda: None),  # the server, which runs
    "model": model,
    "served_model_name": "default",
    "api_key": "none",
    "tokenizer": Tokenizer(),
    "client": openai.OpenAI(base_url=f"{url}/v1", api_key="none"),
    "flush_cache": lambda: requests.post(f"{url}/flush_cache", timeout=60),
    "cache_chunk_size": 64,
    "pause_ignore_eos": True,
    "running_timeout_num_wave1": 2,
    "running_timeout_num_wave2": 2,
}
for chosen in kits:
    kit, _, test = chosen.partition("::")
    name, _, only = kit.partition(":")
    module = importlib.import_module(f"sglang.test.kits.{name}")
    for mixin in [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]:
        if only in ("", mixin.__name__) and any(each.startswith("test_") for each in dir(mixin)):
            own = {each: value for each, value in fixtures.items() if each != "flush_cache"}
            own["flush_cache"] = staticmethod(fixtures["flush_cache"])
            case = type(mixin.__name__, (mixin, unittest.TestCase), {"__module__": module.__name__, **own})
            for each in unittest.defaultTestLoader.getTestCaseNames(case):
                if test == each or (not test and f"{name}::{each}" not in without):
                    unittest.TestSuite([case(each)]).run(Result())
