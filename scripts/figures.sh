#!/usr/bin/env bash
# Every figure and table of one target from its records.
#   scripts/figures.sh [target] [records folder] [output folder]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target="${1:-smollm2}"
records="${2:-runs/$target/bench/decode}"
out="${3:-runs/$target/figures}"
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python

"$python" -m forespark.bench.compare "$records"
for figure in pareto breakdown table; do
  "$python" "plot/$figure.py" --target "$target" --records "$records" --out "$out"
done
