#!/usr/bin/env bash
# Set up, lint, type-check, test.  Arguments go to pytest:  scripts/test.sh tests/fore_d
#
#   FAST=1   leave out the tests that start a vLLM engine
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./setup.sh
.venv/bin/ruff check .
.venv/bin/mypy
markers=()
[[ "${FAST:-0}" != 1 ]] || markers=(-m "not engine")
.venv/bin/python -m pytest "${markers[@]}" "$@"
