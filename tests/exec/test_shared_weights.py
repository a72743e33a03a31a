"""Processes that share weights have one copy of them, a file, and compute the same."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tenuto.base.config import DEFAULT_MODEL, cache_dir
from tenuto.base.errors import ConfigError, ModelError
from tenuto.exec.load import ExecutorOptions, load_executor
from tenuto.exec.model_executor import ModelExecutor
from tenuto.models.store import resolve
from tests.exec.driver import Driver
from tests.exec.kernels import HERE
from tests.models.tiny import save_hf, tiny_llama

pytestmark = pytest.mark.skipif(not HERE.variants(), reason="no native kernels on this CPU")

PROMPT = [3, 14, 15, 92, 65, 35]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with the kernels of the usual one."""
    directory = tmp_path / "cache"
    directory.mkdir()
    kernels = cache_dir() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (directory / "kernels").symlink_to(kernels)
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_hf(tmp_path / "model", tiny_llama(attention_bias=True))


@contextmanager
def opened(model: Path | str, cache: Path, *, share: bool = True, **options: Any) -> Iterator[ModelExecutor]:
    files = resolve(str(model), cache_dir())
    executor = load_executor(files, ExecutorOptions(16, share_weights=share, cache=cache, **options))
    try:
        yield executor
    finally:
        executor.close()
        del executor
        gc.collect()  # ends the mappings of its weights


def logits(executor: ModelExecutor) -> np.ndarray:
    return executor.logits(Driver(executor, pages=4, rows=1).plan([(0, PROMPT, len(PROMPT))]))


def shared(cache: Path) -> list[Path]:
    return sorted(path for path in (cache / "weights").iterdir() if path.name != "lock")


def mappings(file: Path, process: int | str = "self") -> list[str]:
    """Returns the permissions of a process's mappings of a file."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return [line.split()[1] for line in lines if line.endswith(str(file))]


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}], ids=str)
@pytest.mark.parametrize("name", ["quantized", "floats"])
def test_the_first_process_fills_the_file_and_others_map_it(
    name: str, options: dict[str, Any], model: Path, cache: Path
) -> None:
    path = DEFAULT_MODEL if name == "quantized" else model
    with opened(path, cache, share=False, **options) as alone:
        expected = logits(alone)
    with opened(path, cache, **options) as first:
        (file,) = shared(cache)
        assert np.array_equal(logits(first), expected)
        assert set(mappings(file)) == {"rw-s"}
        with opened(path, cache, **options) as second:
            assert set(mappings(file)) == {"rw-s", "r--s"}
            assert np.array_equal(logits(second), expected)
    del first, second
    gc.collect()
    with opened(path, cache, **options) as third:
        assert set(mappings(file)) == {"r--s"}
        assert np.array_equal(logits(third), expected)


CHILD = """
import sys
from pathlib import Path
from tests.exec.test_shared_weights import logits, opened
print("ready", flush=True)
sys.stdin.readline()
with opened(sys.argv[1], Path(sys.argv[2])) as executor:
    print(logits(executor).tobytes().hex(), flush=True)
    sys.stdin.readline()
"""


def test_processes_that_start_at_once_pack_the_weights_once(model: Path, cache: Path) -> None:
    with opened(model, cache, share=False) as alone:
        expected = logits(alone).tobytes().hex()
    command = [sys.executable, "-c", CHILD, str(model), str(cache)]
    with ExitStack() as stack:
        children = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(3)
        ]
        tells = [child.stdin for child in children if child.stdin is not None]
        says = [child.stdout for child in children if child.stdout is not None]
        assert [each.readline() for each in says] == ["ready\n"] * 3
        for each in tells:
            each.write("\n")
            each.flush()
        assert [each.readline().strip() for each in says] == [expected] * 3
        (file,) = shared(cache)
        found = sorted(mappings(file, child.pid) for child in children)
        assert found == [["r--s"], ["r--s"], ["rw-s"]]


def test_other_weights_and_options_have_files_of_their_own_and_unused_ones_go(
    model: Path, cache: Path, tmp_path: Path
) -> None:
    other = save_hf(tmp_path / "other", tiny_llama(attention_bias=True))
    with opened(model, cache):
        (first,) = shared(cache)
        with opened(other, cache):
            assert len(shared(cache)) == 2
        with opened(model, cache, dtype="bfloat16"):
            assert len(shared(cache)) == 2
            assert first in shared(cache)
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")  # a new stamp
    with opened(model, cache):
        (last,) = shared(cache)
        assert last != first


def test_a_model_that_cannot_be_packed_leaves_no_file(model: Path, cache: Path) -> None:
    file = model / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(ModelError), opened(model, cache):
        pass
    file.write_bytes(whole)
    (cache / "weights").mkdir(exist_ok=True)
    (cache / "weights" / "ended.part").write_bytes(b"from a process that was killed")
    with opened(model, cache):
        (made,) = shared(cache)
        assert made.suffix == ".weights"


def test_without_room_the_reason_is_given_and_nothing_is_left(model: Path, cache: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with (
            pytest.raises(ConfigError, match=r"no memory for the model's weights: .*File too large"),
            opened(model, cache),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert shared(cache) == []


def test_a_file_that_was_cut_is_refused(model: Path, cache: Path) -> None:
    with opened(model, cache):
        (file,) = shared(cache)
    with file.open("r+b") as cut:
        cut.truncate(4096)
    with pytest.raises(ConfigError, match="a file of packed weights is shorter than it was"), opened(model, cache):
        pass


def test_plain_pytorch_has_no_packed_weights(model: Path, cache: Path) -> None:
    with pytest.raises(ConfigError, match="share_weights needs native kernels"), opened(model, cache, kernels="torch"):
        pass
