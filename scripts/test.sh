#!/usr/bin/env bash
# Set up, lint, type-check, test.  Arguments go to pytest:  scripts/test.sh tests/fore_d
#
#   FAST=1      leave out the tests that start a vLLM engine
#   FULL=1      64 answer tokens instead of 24 where arms are compared with AR on real prompts
#   WORKERS=1   one process instead of one per core, of which there are at most two
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./setup.sh
.venv/bin/ruff check --no-cache .  # its cache does not see a new folder that renames a module
.venv/bin/mypy
markers=()
[[ "${FAST:-0}" != 1 ]] || markers=(-m "not engine")
workers=${WORKERS:-$(($(nproc) < 2 ? 1 : 2))}
parallel=()
((workers <= 1)) || parallel=(-n "$workers" --dist loadfile --no-loadscope-reorder)
.venv/bin/python -m pytest "${parallel[@]}" "${markers[@]}" "$@"
