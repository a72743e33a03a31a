"""Digests cover every byte of the weights, and equal no other when the loaded weights cannot be known."""

import os
from pathlib import Path

from tenuto.models.digest import WeightsDigest
from tenuto.models.store import FileFormat, ModelFiles


def digest(path: Path) -> str:
    kind = FileFormat.HUGGING_FACE if path.is_dir() else FileFormat.GGUF
    return WeightsDigest(ModelFiles("m", kind, path)).value


def test_any_byte_of_a_large_file_changes_the_digest(tmp_path: Path) -> None:
    path, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    content = bytes(range(256)) * 150_000  # three pieces
    path.write_bytes(content)
    other.write_bytes(content)
    assert digest(other) == digest(path)
    found = {digest(path)}
    for at in (0, 1_000_000, 2**24 - 1, 2**24, 20_000_001, len(content) - 1):
        with other.open("r+b") as file:
            file.seek(at)
            file.write(bytes([content[at] ^ 1]))
        found.add(digest(other))
    os.truncate(other, len(content) - 1)
    found.add(digest(other))
    assert len(found) == 8


def test_models_that_differ_in_one_matrix_have_different_digests(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')
    weights = tmp_path / "model.safetensors"
    content, size, seen = bytes(16 * 300 * 2**10), 300 * 2**10, set()
    for layer in range(16):
        weights.write_bytes(content[: layer * size] + b"\x80" * size + content[(layer + 1) * size :])
        seen.add(digest(tmp_path))
    assert len(seen) == 16
    before = digest(tmp_path)
    (tmp_path / "config.json").write_text('{"rope_theta": 2}')
    assert digest(tmp_path) != before


def test_the_digest_covers_every_file_of_a_split_model_and_no_other_file(tmp_path: Path) -> None:
    paths = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for path in (*paths, tmp_path / "m-00001-of-00003.gguf", tmp_path / "m.gguf"):
        path.write_bytes(b"GGUF")
    before = digest(paths[0])
    (tmp_path / "m.gguf").write_bytes(b"another")
    (tmp_path / "m-00001-of-00003.gguf").write_bytes(b"another")
    assert digest(paths[0]) == before
    paths[1].write_bytes(b"GGUG")
    assert digest(paths[0]) != before


def test_weights_whose_files_changed_after_loading_have_a_unique_digest(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF 1")
    files = ModelFiles("m", FileFormat.GGUF, path)
    loaded, twin = WeightsDigest(files), WeightsDigest(files)
    assert loaded.stamps == loaded.again().stamps
    path.write_bytes(b"GGUF 2")
    os.utime(path, ns=(loaded.stamps[0].modified,) * 2)  # restoring the time hides nothing
    assert loaded.stamps != loaded.again().stamps
    assert len({loaded.value, twin.value, loaded.again().value, digest(path)}) == 3
    assert loaded.value == loaded.value
    path.unlink()
    assert WeightsDigest(files).value != loaded.again().value
