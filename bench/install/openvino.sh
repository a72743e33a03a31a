#!/usr/bin/env bash
# OpenVINO GenAI, which reads the GGUF itself.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

VERSION=2026.4.1.0
environment "$PEERS/openvino/venv" "openvino-genai==$VERSION"
"$PEERS/openvino/venv/bin/python" -c 'import openvino_genai' || fail "openvino_genai cannot be imported"
done_with "$PEERS/openvino" "$VERSION"
