"""A small random Qwen3-Next with its head for multi-token prediction, which transformers leaves out."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import PreTrainedModel

from tests.models.tiny_hybrids import tiny_qwen3_next


class Reference:
    """The model, and a head that is written down from the description of the published ones: the normalised embedding
    of a token and the normalised output of the model at the position before are projected together, and go through a
    layer of attention, a norm, and the model's output matrix. The layer and the norm are transformers'."""

    def __init__(self) -> None:
        self.model = tiny_qwen3_next()
        self.layer = tiny_qwen3_next(num_hidden_layers=1, layer_types=["full_attention"], mlp_only_layers=[])
        hidden = self.model.config.hidden_size
        torch.manual_seed(3)
        self.join = torch.randn(hidden, 2 * hidden) * 0.2
        self.of_embedding, self.of_output = torch.randn(2, hidden) * 0.3

    def save(self, directory: Path) -> Path:
        """Writes the model as published: norms are stored as their difference from 1."""
        self.model.save_pretrained(directory)
        of_layer = {
            name.replace("model.", "mtp.", 1): tensor.contiguous()
            for name, tensor in saved(self.layer, directory / "layer").items()
            if name.startswith(("model.layers.", "model.norm."))
        }
        own = {
            "mtp.fc.weight": self.join,
            "mtp.pre_fc_norm_embedding.weight": self.of_embedding,
            "mtp.pre_fc_norm_hidden.weight": self.of_output,
        }
        path = directory / "model.safetensors"
        save_file(load_file(path) | of_layer | own, path)
        return directory

    @torch.inference_mode()
    def outputs(self, tokens: list[int]) -> torch.Tensor:
        """Returns the model's outputs, [tokens, hidden], of its last norm."""
        return self.model.base_model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]

    @torch.inference_mode()
    def predicted(self, outputs: torch.Tensor, following: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the head's outputs, [tokens, hidden], and its logits, [tokens, vocab]. `following`: the token after
        each of those with these `outputs`."""
        embedded = self.model.get_input_embeddings()(torch.tensor(following))
        parts = [
            functional.rms_norm(x, x.shape[-1:], 1 + weight, self.model.config.rms_norm_eps)
            for x, weight in ((embedded, self.of_embedding), (outputs, self.of_output))
        ]
        joined = torch.cat(parts, dim=1) @ self.join.t()
        found = self.layer.base_model(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0]
        return found, self.model.get_output_embeddings()(found)


def saved(model: PreTrainedModel, directory: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors that transformers writes."""
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")
