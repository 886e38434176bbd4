#!/bin/sh
# setup.sh VENV EXTRAS: fill a virtual environment with hpcrun and what it needs; says in a line what is missing.
# Environment: PYTHON, TORCH, TORCH_INDEX, as `make help` explains them.
set -eu
venv=$1 extras=$2
needed_kb=2621440 # 2.5 GB

fail() {
    echo "setup: $*" >&2
    exit 3
}

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

create() {
    python=
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if recent "$candidate"; then
            python=$candidate
            break
        fi
    done
    if [ -z "$python" ]; then
        found=$("${PYTHON:-python3}" --version 2>&1) || found="no ${PYTHON:-python3}"
        fail "found $found, needs Python 3.11 or newer; install it, or run make PYTHON=/path/to/python3.11"
    fi
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$python has no venv module; install it (Debian and Ubuntu: apt install python3-venv)"
    mkdir -p "$venv" 2>/dev/null || fail "cannot create $venv; run make VENV=/a/directory/you/may/write"
    free_kb=$(df -Pk "$venv" | awk 'NR == 2 { print $4 }')
    [ "$free_kb" -ge $needed_kb ] ||
        fail "$((free_kb / 1024)) MB free for $venv, needs about 2500; make room, or run make VENV=/another/disk/venv"
    "$python" -m venv --clear "$venv" || fail "$python -m venv $venv failed; its message stands above"
}

[ -x "$venv/bin/python" ] || create
command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
    echo "setup: note: no C++ compiler here; only train.compile needs one (Debian and Ubuntu: apt install g++)" >&2
echo "setup: installing hpcrun[$extras] into $venv; the first time takes some minutes" >&2
quiet=-q
[ ! -t 2 ] || quiet=
# shellcheck disable=SC2086 # both may be empty, TORCH_INDEX may be several words
"$venv/bin/python" -m pip install $quiet --disable-pip-version-check ${TORCH_INDEX-} \
    "${TORCH:-torch==2.13.0}" -e ".[$extras]" ||
    fail "pip could not install; its message stands above (no network? name a mirror with PIP_INDEX_URL)"
