"""Models with the default one's vocabulary: its first layers, or all of them and more that add nothing.

The former is a draft model that is often wrong. The latter says what the original says, at the cost of a larger model,
of which the original is a draft model that is always right.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

ADDING = ("attn_output.weight", "ffn_down.weight")
"""The tensors of a layer whose products are added to its input."""


def with_layers(source: Path, path: Path, layers: int) -> Path:
    """Writes the model at `source`, a file in the GGUF format, to `path`, with the first `layers` of its layers. If it
    has fewer, copies of the first one follow that add nothing. Returns `path`."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    count = f"{architecture}.block_count"
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = layers if name == count else field.contents()
        writer.add_key_value(name, value, field.types[0], field.types[1] if len(field.types) > 1 else None)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    own = reader.fields[count].contents()
    for name, tensor in tensors.items():
        if not name.startswith("blk.") or int(name.split(".")[1]) < layers:
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    for layer in range(own, layers):
        for name, tensor in tensors.items():
            if name.startswith("blk.0."):
                part = name.removeprefix("blk.0.")
                data = np.zeros_like(tensor.data) if part in ADDING else tensor.data
                writer.add_tensor(f"blk.{layer}.{part}", data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
