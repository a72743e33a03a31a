"""The checks and measurements of a GPU run, on tiny shapes and without one, and what fails or is late is reported."""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from bench.gpu import __main__ as command
from bench.gpu import checks, children, models, server, sessions, speed
from bench.gpu.report import Check, Report, Verdict
from bench.random_models import TYPES, attention, model
from tenuto.base.sampling import GREEDY
from tenuto.exec.gpu.forward import GpuForward
from tenuto.exec.model_executor import ModelExecutor
from tenuto.models.config import Experts, GatedDelta
from tests.eventually import eventually
from tests.exec.gpu.conftest import DEVICE
from tests.exec.gpu.queue import HostQueue

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there it is run as it is")

TINY = model(1, 32, [attention(2, 1, 16)], 64, 67, 256)


@dataclass
class Event:
    """An event on the host."""

    at: float = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return max(1e3 * (other.at - self.at), 1e-3)


LAUNCH = GridExecutor.__call__


def bound(self: GridExecutor, *args: object, **kwargs: object) -> None:
    """Launches nothing."""
    names = inspect.signature(self.fn).parameters
    inspect.getcallargs(self.fn, *args, **{name: value for name, value in kwargs.items() if name in names})


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Makes all parts small, and lets them run on the host, without computing: launches of kernels only bind their
    arguments, and what they would write is zero."""
    monkeypatch.setattr(GridExecutor, "__call__", bound)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    for module in (models, checks, speed, sessions, command):
        for name, value in {"CUDA": DEVICE, "EIGHT": TINY}.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(models, "CudaQueue", lambda device: HostQueue())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="none"))
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event())
    monkeypatch.setattr(torch.profiler, "ProfilerActivity", SimpleNamespace(CUDA=torch.profiler.ProfilerActivity.CPU))
    for name in ("synchronize", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    small: dict[ModuleType, dict[str, object]] = {
        checks: {
            "SMALL": {
                "full attention": TINY,
                "gated delta net": replace(TINY, layers=(replace(TINY.layers[0], mixer=GatedDelta(1, 2, 8, 8, 4)),)),
                "experts": replace(
                    TINY, layers=(replace(TINY.layers[0], feed_forward=Experts(3, 2, 32, normalised=True)),)
                ),
            },
            "RECURRENT": {},
            "HOW": {"grammar, penalties": (checks.EDITED, True)},
            "TYPES": {"fp8": TYPES["fp8"]},
            "PROCESSES": "0",
            "PROMPTS": (2, 5),
            "SAMPLED": 1,
            "GUESSING": [5, 1],
            "GUESSED": 3,
            "LONG_PROMPTS": (2, 9),
            "DECODED": 2,
            "WIDE": {"a model": TINY},
        },
        speed: {
            "TYPES": {"fp8": TYPES["fp8"]},
            "BATCHES": (1,),
            "CONTEXT": 40,
            "HOST": 2,
            "DECODES": 2,
            "PROMPT": 33,
            "PARKED": 2**14,
            "COPIED": 2**10,
            "SIDE": 16,
            "MATRICES": ((32, 128),),
            "UNCACHED": 2**10,
            "PRODUCT_ROWS": (1,),
            "EXPERTS": (3, 2, 128, 64),
            "EXPERTS_ROWS": (2,),
            "RECURRENT_ROWS": (1,),
        },
        sessions: {"LOAD": sessions.Load(sessions=2, turns=1, given=5, sampled=2)},
        command: {"ROWS": 2, "QUANTIZED": ("fp8",)},
    }
    for module, values in small.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    return monkeypatch


def test_every_part_runs_and_a_failing_one_is_reported_beside_the_others(
    tiny: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("it | broke")

    tiny.setattr(server, "conversations", broken)
    tiny.setattr(speed, "parking", broken)
    tiny.setattr(checks, "KERNELS_TESTS", ["tests/kernels/gpu/test_compiles.py"])
    assert command.main(["--out", str(tmp_path)]) == 1, "parts failed"
    text, found = (tmp_path / "gpu.md").read_text(), json.loads((tmp_path / "gpu.json").read_text())
    assert found["checks"].pop("server") == "failed: RuntimeError: it | broke"
    assert "| server | failed | RuntimeError: it / broke |" in text
    assert found["missing"] == {"parking": "failed: RuntimeError: it | broke"}
    assert "| parking | failed: RuntimeError: it / broke |" in text
    assert found["checks"].pop("sanitizer") == "left out: there is no compute-sanitizer"
    assert found["checks"]["waiting"].startswith("same")
    failed = {name: result for name, result in found["checks"].items() if not result.startswith(("same", "differs"))}
    assert not failed
    assert {name.partition(":")[0] for name in found["checks"]} == {"turns", "waiting", "kernels", "16 bits", "guesses"}
    measured = {name.partition(" ")[0] for name in found} - {"gpu", "torch", "triton", "checks", "missing"}
    each = {"decode", "prefill", "asking", "sessions", "experts", "recurrent", "products", "kernels"}
    assert measured == {"limits", *each}
    assert found["asking"]["masks"]["host_us"] > 0


def test_a_limit_or_a_model_that_cannot_be_made_fails_for_itself(tiny: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    tiny.setattr(speed, "limits", broken)
    tiny.setattr(speed, "BATCHES", (1,))
    assert command.main(["--out", str(tmp_path), "--only", "decode"]) == 1
    text = (tmp_path / "gpu.md").read_text()
    assert "| limits | failed: RuntimeError: out of memory |" in text
    assert "| bfloat16 | 1 |" in text
    assert "| nan |" in text
    tiny.setattr(models, "Decoder", broken)
    assert command.main(["--out", str(tmp_path), "--only", "decode", "prefill", "turns"]) == 1
    missing = json.loads((tmp_path / "gpu.json").read_text())["missing"]
    assert missing.keys() == {"limits", "decode bfloat16 1", "prefill bfloat16"}


def test_other_tokens_are_a_difference(tiny: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny.setattr(checks, "turns", lambda: {"one": partial(checks._compared, TINY, GREEDY)})
    assert command.main(["--out", str(tmp_path), "--only", "turns"]) == 1
    line = "| turns: one | differs | queued steps differ from PyTorch from step 0 on; captured steps differ"
    assert line in (tmp_path / "gpu.md").read_text()
    tiny.setattr(GridExecutor, "__call__", LAUNCH)
    assert command.main(["--out", str(tmp_path), "--only", "turns"]) == 0
    assert "| turns: one | same | 4 tokens" in (tmp_path / "gpu.md").read_text()


def report_of(folder: Path, seconds: float) -> Report:
    return Report(folder, {"gpu": "none", "torch": "2", "triton": "3"}, time.perf_counter() + seconds)


def test_a_part_that_takes_too_long_is_interrupted_and_later_ones_are_left_out(tmp_path: Path) -> None:
    report, begun = report_of(tmp_path, 0.2), list[object]()

    def made(stack: ExitStack) -> ModelExecutor:
        raise AssertionError

    def slow() -> Check:
        try:
            threading.Event().wait()
        except Exception:  # noqa: BLE001 - a part may catch what fails in it
            return Check(Verdict.SAME)
        raise AssertionError

    with report.limited():
        report.check("slow", slow)
        report.measure("late", lambda: begun.append("late"))
        report.measure_on(made, {"later": begun.append})
    assert not begun
    assert report.checks == {"slow": Check(Verdict.LEFT_OUT, "the time was over before its end")}
    assert {each.verdict for each in report.missing.values()} == {Verdict.LEFT_OUT}
    assert report.status == 0
    assert "| slow | left out |" in (tmp_path / "gpu.md").read_text()


def test_a_part_that_heeds_nothing_ends_the_process_and_the_table_is_there(tmp_path: Path) -> None:
    code = f"""
import signal, time
from pathlib import Path
from bench.gpu import report
report.GRACE = 0.2
made = report.Report(Path({str(tmp_path)!r}), {{"gpu": "none", "torch": "2", "triton": "3"}}, time.perf_counter() + 0.2)
with made.limited():
    made.check("first", lambda: report.Check(report.Verdict.SAME))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    made.check("stuck", lambda: time.sleep(60))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "stopped\n")
    text = (tmp_path / "gpu.md").read_text()
    assert "| first | same |" in text
    assert "did not stop when the time was over" in text


def test_children_are_killed_with_what_they_started(tmp_path: Path) -> None:
    slow = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '99']).pid, flush=True); time.sleep(99)"
    log, other = tmp_path / "log", tmp_path / "other"
    done = children.run({log: [sys.executable, "-c", slow], other: ["sh", "-c", "exit $N"]}, 1.5, {other: {"N": "3"}})
    assert done == {log: None, other: 3}
    pid = int(log.read_text())
    state = Path(f"/proc/{pid}/stat")
    eventually(lambda: not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z")


SUMMARY = "========= ERROR SUMMARY: {} errors"


@pytest.mark.parametrize(
    ("output", "status", "verdict"),
    [
        (["========= COMPUTE-SANITIZER", "a computed", SUMMARY.format(0)], 0, Verdict.SAME),
        (
            ["========= COMPUTE-SANITIZER", "========= Invalid __global__ read of size 4", SUMMARY.format(1)],
            0,
            Verdict.FAILED,
        ),
        (["========= COMPUTE-SANITIZER", "========= Invalid __global__ read of size 4"], None, Verdict.FAILED),
        (["========= COMPUTE-SANITIZER", "a computed", "b computed"], None, Verdict.LEFT_OUT),
        (["Traceback", "RuntimeError: no"], 1, Verdict.FAILED),
        ([], 0, Verdict.FAILED),
    ],
)
def test_the_memory_checker_has_a_verdict(
    output: list[str], status: int | None, verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/true")
    monkeypatch.setattr(children, "run", lambda commands, *_: dict.fromkeys(commands, status))
    for kind in ("Eager", "GpuForward"):
        (tmp_path / f"sanitizer-{kind}.txt").write_text("\n".join(output))
    found = checks.memory_checker(tmp_path, 9)
    assert isinstance(found, dict)
    assert {each.verdict for each in found.values()} == {verdict}


def test_the_steps_for_the_memory_checker_are_computed(
    tiny: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.setattr(checks, "SMALL", {"full attention": TINY})
    checks.few_steps(GpuForward)
    assert capsys.readouterr().out == "full attention computed\n"
