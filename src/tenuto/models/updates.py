"""Models some of whose tensors have been replaced while they run: directories that point to the files of both."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from functools import partial
from itertools import count
from pathlib import Path

from tenuto.base.checks import shown
from tenuto.base.errors import InvalidRequest, Unsupported
from tenuto.formats.safetensors_file import BITS, SafeTensor
from tenuto.formats.tensor_pickle import NamedTensor
from tenuto.models.checkpoint import open_checkpoint
from tenuto.models.hf import HfCheckpoint
from tenuto.models.store import ModelFiles
from tenuto.models.weights import FLOATS, Bytes, StoredWeight, wrong_shape

_AT_ONCE = 2**22  # number of elements converted at a time
_EXPONENTS = {"F32": 0x7F80_0000, "F16": 0x7C00, "BF16": 0x7F80}
"""The bits that are all set in infinite values and NaN."""


class UpdatedModels:
    """Writes models made of a model's files and of new tensors, in a temporary directory.

    Invariant: the directory has the model that `keep` was called with last, the one that was written last, and the
    files of tensors that these need.
    """

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="tenuto-weights-")
        self._numbers = count()
        self._kept: Path | None = None

    def write(self, base: ModelFiles, tensors: Mapping[str, NamedTensor]) -> Path:
        """Returns the directory of a model that has `tensors` in place of those of `base`, converted to the types of
        those; an output matrix that `base` ties to its embedding is left out. Raises `InvalidRequest` for tensors that
        it does not have, with another shape, or with infinite values or NaN, and `Unsupported` if it is quantized."""
        checkpoint = _unquantized(base)
        stored = checkpoint.stored
        replaced = {name: tensor for name, tensor in tensors.items() if not checkpoint.redundant(name)}
        for name, tensor in replaced.items():
            _check(name, tensor, stored.get(name))
        number = next(self._numbers)
        root = Path(self._place.name).resolve()
        file, directory = root / f"tensors-{number}.safetensors", root / f"model-{number}"
        _write(file, {name: (stored[name], tensor) for name, tensor in replaced.items()})
        places = {name: each.span.path for name, each in stored.items() if not checkpoint.redundant(name)}
        places |= dict.fromkeys(replaced, file)
        _link(directory, base.path, places)
        return directory

    def keep(self, directory: Path) -> None:
        """Removes what only earlier models need."""
        self._kept = directory
        self.discard()

    def discard(self) -> None:
        """Removes everything but the model that is kept."""
        needed = {link.resolve() for link in self._kept.iterdir()} if self._kept is not None else set[Path]()
        for path in Path(self._place.name).resolve().iterdir():
            if path.is_file() and path not in needed:
                path.unlink()
            elif path.is_dir() and path != self._kept:
                shutil.rmtree(path)  # of links

    def close(self) -> None:
        """Removes the directory."""
        self._place.cleanup()


def tensor_of(base: ModelFiles, name: str) -> StoredWeight:
    """Returns a tensor of a model by the name it has in the model's files; of a GGUF file, by that of Llama's. Raises
    `InvalidRequest` for other names."""
    checkpoint = open_checkpoint(base)
    found = checkpoint.tensor(name) if isinstance(checkpoint, HfCheckpoint) else dict(checkpoint.weights()).get(name)
    if found is None:
        raise _unknown(name, "name")
    return found


def _unquantized(base: ModelFiles) -> HfCheckpoint:
    checkpoint = open_checkpoint(base)
    if checkpoint.config.headless:
        raise Unsupported("the model only embeds; allowed: replacing tensors of models that generate")
    if isinstance(checkpoint, HfCheckpoint):
        return checkpoint
    kinds = sorted({weight.kind.name for _, weight in checkpoint.weights()})
    raise Unsupported(
        f"the model is a GGUF file with tensors of types {', '.join(kinds)}, which are not replaced one by one; "
        "allowed: a model in a directory of safetensors files, or other whole weights by /update_weights_from_disk"
    )


def _check(name: str, tensor: NamedTensor, stored: SafeTensor | None) -> None:
    """Raises `InvalidRequest` or `Unsupported` unless `tensor` can take the place of `stored`."""
    if stored is None:
        raise _unknown(name, None)
    if stored.dtype not in FLOATS:
        raise Unsupported(
            f"tensor {shown(name)} of the model is quantized ({stored.dtype}); allowed: replacing tensors of types "
            f"{', '.join(FLOATS)}, or other whole weights by /update_weights_from_disk"
        )
    if tensor.shape != stored.shape:
        raise InvalidRequest(wrong_shape(name, tensor.shape, stored.shape).message)
    if tensor.dtype not in FLOATS:
        raise InvalidRequest(f"tensor {shown(name)} is of type {tensor.dtype}; allowed: {', '.join(FLOATS)}")


def _unknown(name: str, param: str | None) -> InvalidRequest:
    return InvalidRequest(f"the model has no tensor {shown(name)}; allowed: names in the model's files", param=param)


def _write(file: Path, pairs: Mapping[str, tuple[SafeTensor, NamedTensor]]) -> None:
    """Writes a safetensors file with new tensors in the types of the stored ones."""
    header, at = {}, 0
    for name, (stored, _) in pairs.items():
        header[name] = {"dtype": stored.dtype, "shape": stored.shape, "data_offsets": [at, at + stored.span.size]}
        at += stored.span.size
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, (stored, tensor) in pairs.items():
            bytes_each = BITS[tensor.dtype] // 8
            rows = tensor.data.reshape(tensor.shape[0] if len(tensor.shape) > 1 else 1, -1)
            weight = StoredWeight(FLOATS[tensor.dtype], (len(rows), rows.shape[1] // bytes_each), partial(_same, rows))
            step = max(1, _AT_ONCE // max(1, rows.shape[1]))
            exponent = _EXPONENTS[stored.dtype]
            for words in weight.words(FLOATS[stored.dtype], step):
                if (words & exponent == exponent).any():
                    raise InvalidRequest(
                        f"tensor {shown(name)} has infinite values or NaN as {stored.dtype}; allowed: finite ones"
                    )
                out.write(words.tobytes())


def _same(rows: Bytes) -> Bytes:
    return rows


def _link(directory: Path, base: Path, places: Mapping[str, Path]) -> None:
    """Makes a directory with links to a model's descriptions and to the files of its tensors."""
    directory.mkdir()
    names: dict[Path, str] = {}
    for path in places.values():
        names.setdefault(path, f"{len(names)}.safetensors")
    for path, name in names.items():
        (directory / name).symlink_to(path.resolve())
    for path in base.glob("*.json"):
        if path.name != HfCheckpoint.INDEX:
            (directory / path.name).symlink_to(path.resolve())
    index = {"weight_map": {name: names[path] for name, path in places.items()}}
    (directory / HfCheckpoint.INDEX).write_text(json.dumps(index))
