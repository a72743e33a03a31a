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
