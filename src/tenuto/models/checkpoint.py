"""A common interface to the configuration and weights of models in all file formats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from tenuto.base.errors import ModelError
from tenuto.formats.gguf_file import GgufFile
from tenuto.models.adapter import Translation
from tenuto.models.config import PREDICTOR, ModelConfig
from tenuto.models.gguf import GgufCheckpoint
from tenuto.models.hf import HfCheckpoint
from tenuto.models.store import FileFormat, ModelFiles
from tenuto.models.weights import StoredWeight


class ModelCheckpoint(Protocol):
    """A configuration and the named weights that belong to it."""

    @property
    def config(self) -> ModelConfig:
        """The shape of the model."""

    def weights(self) -> Iterator[tuple[str, StoredWeight]]:
        """Yields every weight once, in any order, under our name and in our layout.

        These are the names and layouts of Llama in Hugging Face directories, e.g. `model.layers.0.mlp.up_proj.weight`,
        [ffn, hidden]. Weights that Llama lacks are named by the blocks' `places`. `input_layernorm` precedes a layer's
        mixer, `post_attention_layernorm` its feed-forward network. Norms multiply by their weight. A head's rotary
        pairs are its rows (i, i + pairs).
        """

    @property
    def translation(self) -> Translation:
        """The translation of matrices with any number of inputs, named as in the model's Hugging Face directory, to our
        names and layout. Those with unknown names are passed on. It does not refer to this object."""


def weights_of(checkpoint: ModelCheckpoint, config: ModelConfig) -> Iterator[tuple[str, StoredWeight]]:
    """Yields the weights, without those of a head that `config` leaves out."""
    return (each for each in checkpoint.weights() if config.predictor or not each[0].startswith(PREDICTOR))


def open_checkpoint(files: ModelFiles, opened: GgufFile | None = None) -> ModelCheckpoint:
    """Reads a model's configuration; `weights()` reads the weights. `opened`: the GGUF file, if it is open already.
    Raises `ModelError`."""
    try:
        match files.format:
            case FileFormat.GGUF:
                return GgufCheckpoint(opened or files.path)
            case FileFormat.HUGGING_FACE:
                return HfCheckpoint(files.path)
    except (ArithmeticError, ValueError) as error:
        raise ModelError(f"{files.path} describes a model that cannot be computed: {error}") from error
