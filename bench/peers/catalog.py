"""The peers: their names, their commands, and whether they are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from bench.peers.conversations import CompletionsConversation, IkLlamaConversation, LlamaConversation
from bench.peers.workload import Shape
from tenuto.base.config import DEFAULT_MODEL, cache_dir
from tenuto.cli.bench_apis import BenchConversation, TenutoConversation
from tenuto.exec.device import usable_cores
from tenuto.kernels.native.build import Machine
from tenuto.models.store import resolve

CACHE_GIB = 1
"""Memory for keys and values, more than twice what the largest shape needs."""
SPARE_TOKENS = 128
"""Additional context of a session, for blocks that are not full."""
VLLM_CONTEXT = 4096
"""Context for all shapes: vLLM takes a minute to start, so it is started only once."""
LLAMA_PROGRAMS = "llamacpp/build/bin"
INSIDE = Path(__file__).parent / "inside"


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings common to all peers: the paths of the model and of the installed peers, and the number of threads."""

    model: str
    gguf: Path
    peers: Path
    threads: int

    @classmethod
    def of_this_machine(cls) -> Setting:
        """Returns the settings with the default model and the directory of `bench/install`. Raises `ModelError` without
        the model."""
        path = resolve(DEFAULT_MODEL, cache_dir()).path
        return cls(DEFAULT_MODEL, path, cache_dir() / "peers", usable_cores())


Command = Callable[[Setting, Shape], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Server:
    """The interface of a server. Its command gets a `--port` option, and the path `ready` answers once it can be
    used."""

    conversation: type[BenchConversation]
    history: str
    ready: str


@dataclass(frozen=True, slots=True)
class Peer:
    """One row of the tables. `home`: the directory, below the installed peers, that `bench/install/HOME.sh` fills.
    Without `server`, the command is a program of `bench.peers.inside`. `once`: start it once for all shapes. `single`:
    measure it in the first round only, to save time. `feature`: one of the CPU, by Linux's name, without which it
    fails. `asked`: measure it only if it is named."""

    name: str
    title: str
    command: Command
    server: Server | None = None
    home: str = ""
    environment: Callable[[Setting], Mapping[str, str]] = field(default=lambda _: {})
    once: bool = False
    single: bool = False
    feature: str = ""
    asked: bool = False

    def absence(self, setting: Setting, machine: Machine) -> str:
        """Returns why the peer cannot be measured; empty if it can."""
        if self.feature and self.feature not in machine.features:
            return f"Not on this CPU, which lacks {self.feature}: {self.title}."
        if self.version(setting) is None:
            return f"Not installed here: {self.title} (`bench/install/{self.home}.sh`)."
        return ""

    def version(self, setting: Setting) -> str | None:
        """Returns the peer's version, which its installation script writes at its end; None if it is not installed."""
        if not self.home:
            return version("tenuto")
        written = setting.peers / self.home / "version"
        return written.read_text().strip() if written.exists() else None


def _context(shape: Shape) -> int:
    return shape.context + SPARE_TOKENS


def _tenuto(setting: Setting, shape: Shape) -> list[str]:
    options = ["--model", setting.model, "--context-length", str(_context(shape)), "--memory", f"{CACHE_GIB}GiB"]
    return [sys.executable, "-c", "from tenuto.cli import main; main()", "serve", "--log-level", "error", *options]


def _tenuto_inside(kv_cache_dtype: str, kernels: str = "auto", speculate: str = "auto") -> Command:
    def command(setting: Setting, shape: Shape) -> list[str]:
        program, context, memory = str(INSIDE / "tenuto_engine.py"), str(_context(shape)), str(CACHE_GIB << 30)
        return [sys.executable, program, setting.model, context, memory, kv_cache_dtype, kernels, speculate]

    return command


def _llama(attention: str, programs: str = LLAMA_PROGRAMS, *more: str) -> Command:
    def command(setting: Setting, shape: Shape) -> list[str]:
        program, threads = str(setting.peers / programs / "llama-server"), str(setting.threads)
        options = ["--model", str(setting.gguf), "--threads", threads, "--parallel", str(shape.sessions)]
        context = str(shape.sessions * _context(shape))
        return [program, *options, "--ctx-size", context, "--flash-attn", attention, *more]

    return command


def _vllm(setting: Setting, _: Shape) -> list[str]:
    python, model = str(setting.peers / "vllm/venv/bin/python"), str(setting.peers / "vllm/model")
    options = ["--dtype", "bfloat16", "--block-size", "32", "--max-model-len", str(VLLM_CONTEXT)]
    server = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [*server, *options, "--enable-prefix-caching", "--enable-prompt-tokens-details"]


def _vllm_environment(setting: Setting) -> dict[str, str]:
    """Returns vLLM's environment: all cores, with the allocator and the OpenMP that its documentation recommends."""
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


Served = tuple[Sequence[str], Mapping[str, str]]
"""A server's command, which gets a `--port` option, and its environment."""


def llama_server(setting: Setting, context: int) -> Served | None:
    """Returns llama.cpp's server for one conversation, with its own chat templates; `None` if it is not installed."""
    program = setting.peers / LLAMA_PROGRAMS / "llama-server"
    options = ["--model", str(setting.gguf), "--threads", str(setting.threads), "--parallel", "1", "--jinja"]
    return ([str(program), *options, "--ctx-size", str(context)], {}) if program.exists() else None


def vllm_server(setting: Setting, context: int) -> Served | None:
    """Returns vLLM's server, which looks for calls of tools in answers; `None` if it is not installed."""
    calls = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    command = [*_vllm(setting, Shape(1, 1)), *calls, "--max-model-len", str(context)]
    return (command, _vllm_environment(setting)) if (setting.peers / "vllm" / "version").exists() else None


def _openvino(kept_as: str, *options: str) -> Command:
    """Returns OpenVINO's command; `kept_as` is its name for the type of keys and values."""

    def command(setting: Setting, _: Shape) -> list[str]:
        arguments = [str(setting.gguf), str(setting.threads), str(CACHE_GIB), kept_as, *options]
        return [str(setting.peers / "openvino/venv/bin/python"), str(INSIDE / "openvino_pipeline.py"), *arguments]

    return command


def _on_lesser(cpu: str) -> Callable[[Setting], Mapping[str, str]]:
    """Returns the environment in which a program finds the features of a CPU whose best kernels are `cpu`:
    `avx512_vnni`, as Ice Lake and Zen 4 without BF16, `avx512`, as Skylake-SP, `avx2_vnni`, as Alder Lake, or `avx2`,
    as Zen 3. Raises `CalledProcessError` if there is no C compiler."""

    def environment(setting: Setting) -> dict[str, str]:
        library = setting.peers / "lesser_cpu.so"
        source = INSIDE / "lesser_cpu.c"
        if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
            command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)]
            library.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(command, check=True)  # noqa: S603 - our source
        return {"LD_PRELOAD": str(library), "BENCH_CPU": cpu}

    return environment


_NGRAM_GUESSES = ("--spec-type", "ngram-mod")
_LLAMA_API = Server(LlamaConversation, "resend", "/health")

PEERS = (
    Peer(
        "tenuto",
        "Tenuto, sessions",
        _tenuto,
        Server(TenutoConversation, "session", "/v1/engine"),
    ),
    Peer(
        "tenuto-resend",
        "Tenuto, history resent",
        _tenuto,
        Server(TenutoConversation, "resend", "/v1/engine"),
        single=True,
    ),
    Peer(
        "llamacpp",
        "llama.cpp, `-fa off`",
        _llama("off"),
        _LLAMA_API,
        "llamacpp",
    ),
    Peer(
        "llamacpp-default",
        "llama.cpp, defaults",
        _llama("auto"),
        _LLAMA_API,
        "llamacpp",
        single=True,
    ),
    Peer(
        "ikllamacpp",
        "ik_llama.cpp",
        _llama("on", "ikllamacpp/build/bin", "--log-disable"),
        Server(IkLlamaConversation, "resend", "/health"),
        "ikllamacpp",
    ),
    Peer(
        "llamacpp-guessing",
        "llama.cpp, `-fa off`, its guesses",
        _llama("off", LLAMA_PROGRAMS, *_NGRAM_GUESSES),
        _LLAMA_API,
        "llamacpp",
        single=True,
    ),
    Peer(
        "ikllamacpp-guessing",
        "ik_llama.cpp, its guesses",
        _llama("on", "ikllamacpp/build/bin", "--log-disable", *_NGRAM_GUESSES),
        Server(IkLlamaConversation, "resend", "/health"),
        "ikllamacpp",
        single=True,
    ),
    Peer(
        "vllm",
        "vLLM, bfloat16",
        _vllm,
        Server(CompletionsConversation, "resend", "/health"),
        "vllm",
        _vllm_environment,
        once=True,
    ),
    Peer("tenuto-inside", "Tenuto, in process", _tenuto_inside("auto")),
    Peer("tenuto-inside-8", "Tenuto, in process, 8-bit KV", _tenuto_inside("int8")),
    Peer("tenuto-inside-plain", "Tenuto, in process, no guesses", _tenuto_inside("auto", speculate="off")),
    Peer(
        "openvino-inside",
        "OpenVINO GenAI, in process, 16-bit KV",
        _openvino("bf16"),
        home="openvino",
        feature="avx512_bf16",
    ),
    Peer(
        "openvino-inside-8",
        "OpenVINO GenAI, in process, 8-bit KV (its default)",
        _openvino("u8"),
        home="openvino",
    ),
    Peer(
        "openvino-inside-8-guessing",
        "OpenVINO GenAI, in process, 8-bit KV, its guesses",
        _openvino("u8", "lookup"),
        home="openvino",
        single=True,
    ),
    *(
        Peer(
            f"tenuto-inside-{kernels}{'-8' if kept_as == 'int8' else ''}",
            f"Tenuto, in process, `--kernels {kernels}`{', 8-bit KV' if kept_as == 'int8' else ''}",
            _tenuto_inside(kept_as, kernels),
            feature=feature,
            asked=True,
        )
        for kernels, feature in (
            ("avx512_bf16", "avx512_bf16"),
            ("avx512_vnni", "avx512_vnni"),
            ("avx512", "avx512bw"),
            ("avx2_vnni", "avx_vnni"),
            ("avx2", "avx2"),
        )
        for kept_as in ("auto", "int8")
    ),
    *(
        Peer(
            f"openvino-inside-8-{cpu}",
            f"OpenVINO GenAI, in process, 8-bit KV, on a CPU with {without}",
            _openvino("u8"),
            home="openvino",
            environment=_on_lesser(cpu),
            feature=feature,
            asked=True,
        )
        for cpu, without, feature in (
            ("avx512_vnni", "AVX-512 and VNNI only", "cpuid_fault"),
            ("avx512", "AVX-512 without VNNI", "cpuid_fault"),
            ("avx2_vnni", "AVX2 and AVX-VNNI only", "avx_vnni"),
            ("avx2", "AVX2 only", "cpuid_fault"),
        )
    ),
)
