#!/usr/bin/env bash
# Decode benchmark of every arm at every load, then its figures:  scripts/bench/decode.sh smollm2
#
#   EVAL_ARGS="--limit 32 bench.loads=[1,8]"   more arguments for eval.py
#   PLOT_ARGS="..."                            more arguments for plot/pareto.py, plot/breakdown.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
usage="usage: scripts/bench/decode.sh TARGET"
case ${1:-} in
-h | --help) echo "$usage" && exit ;;
"" | -*) echo "$usage" >&2 && exit 2 ;;
esac
[[ -x .venv/bin/python ]] || { echo "decode.sh: no .venv here; run ./setup.sh first" >&2; exit 2; }
target=$1
# shellcheck disable=SC2086
.venv/bin/python eval.py --target "$target" --bench decode ${EVAL_ARGS:-}
for figure in pareto breakdown; do
    # shellcheck disable=SC2086
    .venv/bin/python "plot/$figure.py" --target "$target" ${PLOT_ARGS:-}
done
