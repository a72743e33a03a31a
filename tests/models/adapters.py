"""Random adapters, written by PEFT, for small models."""

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


def write_adapter(model: PreTrainedModel, directory: Path, seed: int, **options: Any) -> PreTrainedModel:
    """Gives the model a random adapter, writes it to `directory`, and returns the adapted model, whose `unload` takes
    it away again."""
    given: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ALL, "task_type": "CAUSAL_LM"} | options
    config = LoraConfig(**given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of things in models that have no path
        adapted = get_peft_model(model, config)
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.1)
        adapted.save_pretrained(str(directory))
    return adapted.eval()
