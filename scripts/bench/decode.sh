#!/usr/bin/env bash
# Decode benchmark of every arm at every load, then its figures:  scripts/bench/decode.sh smollm2
#
#   EVAL_ARGS="--limit 32 bench.loads=[1,8]"   more arguments for eval.py
#   PLOT_ARGS="..."                            more arguments for plot/pareto.py, plot/breakdown.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=scripts/stage.sh
source scripts/stage.sh
# shellcheck disable=SC2086
.venv/bin/python eval.py --target "$target" --bench decode ${EVAL_ARGS:-}
for figure in pareto breakdown; do
    # shellcheck disable=SC2086
    .venv/bin/python "plot/$figure.py" --target "$target" ${PLOT_ARGS:-}
done
