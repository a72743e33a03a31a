# What the install scripts share; they source it. Usage of each: SCRIPT [DIRECTORY]
#
# A peer is installed below DIRECTORY, by default where `python -m bench.peers` looks for it, and never into Tenuto's own
# environment. What is there already is kept, so a script can be run again.

set -euo pipefail

PEERS="${1:-${TENUTO_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/tenuto}/peers}"
PYTHON="${PYTHON:-python3}"
JOBS="${JOBS:-$(nproc)}"

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

need() {
    command -v "$1" >/dev/null || fail "$1 is missing; $2"
}

# A virtual environment at $1 with the packages that follow.
environment() {
    local place="$1"
    shift
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$PYTHON is not Python 3.11 or later; set PYTHON"
    [ -x "$place/bin/python" ] || "$PYTHON" -m venv "$place" || fail "$PYTHON cannot make virtual environments"
    "$place/bin/python" -m pip install --quiet --disable-pip-version-check "$@" || fail "pip could not install: $*"
}

# All of the peer below $1 is there, in version $2: only now does the benchmark count it as installed.
done_with() {
    echo "$2" >"$1/version"
    echo "$1: $2"
}

# The programs $3... of llama.cpp or a fork, compiled for this CPU from the sources at $1 into $2. Needs `environment` with
# cmake and ninja first.
compiled() {
    local sources="$1" build="$2" flags=""
    shift 2
    # GCC 12 drops the stores that fill the configuration of AMX tiles, and the program dies.
    if grep -qw amx_tile /proc/cpuinfo && [ "$(g++ -dumpversion | cut -d. -f1)" -le 12 ]; then
        echo "GCC 12 or older: building without AMX"
        flags="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    fi
    cmake -S "$sources" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_FLAGS="$flags" -DCMAKE_CXX_FLAGS="$flags" \
        -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF "${OPTIONS[@]}" \
        >"$HERE/cmake.log" 2>&1 || fail "cmake could not set up the build; see $HERE/cmake.log"
    nice -n 10 cmake --build "$build" -j "$JOBS" --target "$@" >"$HERE/build.log" 2>&1 ||
        fail "the build failed; see $HERE/build.log"
    "$build/bin/llama-server" --version >/dev/null 2>&1 || fail "$build/bin/llama-server does not run"
}
