"""The small hybrid with a head for multi-token prediction, which `tests.hybrid.train_predictor` trains."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open

MODEL = Path(__file__).parent / "model"
HEAD = Path(__file__).parent / "predictor.safetensors"
CONFIG = json.loads((MODEL / "config.json").read_text(encoding="utf-8")) | {"mtp_intermediate_size": 32}


def with_predictor(directory: Path) -> Path:
    """Makes `directory` the hybrid with its head: links to the files of both."""
    directory.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    for file in (MODEL / "model.safetensors", HEAD):
        (directory / file.name).symlink_to(file)
        with safe_open(file, "np") as opened:
            places |= dict.fromkeys(opened.keys(), file.name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).symlink_to(MODEL / name)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return directory
