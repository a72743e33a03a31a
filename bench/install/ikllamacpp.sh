#!/usr/bin/env bash
# ik_llama.cpp, a fork of llama.cpp with kernels of its own for CPUs: its server, compiled for this CPU. IK_LLAMA_CPP names
# the git repository, or a copy of it, that has the sources.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

VERSION=8337e4cd3861406fc04e0854b1409cd1b027fbc9
HERE="$PEERS/ikllamacpp"
SOURCES="$HERE/sources"

need g++ "install a C++ compiler"
need git "install git"
environment "$HERE/venv" cmake ninja
export PATH="$HERE/venv/bin:$PATH"

if [ ! -f "$SOURCES/CMakeLists.txt" ]; then
    git clone --quiet "${IK_LLAMA_CPP:-https://github.com/ikawrakow/ik_llama.cpp}" "$SOURCES" || fail "git could not fetch the sources"
    git -C "$SOURCES" checkout --quiet "$VERSION" || fail "the repository has no commit $VERSION"
fi

OPTIONS=(-DLLAMA_BUILD_EXAMPLES=ON -DGGML_IQK_FA_ALL_QUANTS=OFF)
compiled "$SOURCES" "$HERE/build" llama-server
done_with "$HERE" "${VERSION:0:7}"
