#!/usr/bin/env bash
# OpenVINO GenAI, which reads the GGUF itself.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

environment "$PEERS/openvino/venv" openvino-genai==2026.4.1.0
"$PEERS/openvino/venv/bin/python" -c 'import openvino_genai' || fail "openvino_genai cannot be imported"
echo "$PEERS/openvino/venv"
