#!/usr/bin/env bash
# End-to-end benchmark: a closed loop of conversations, every arm at every load, then its
# figures:  scripts/bench/e2e.sh smollm2
#
#   EVAL_ARGS="--limit 32 bench.rounds=1"   more arguments for eval.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=scripts/stage.sh
source scripts/stage.sh
# shellcheck disable=SC2086
.venv/bin/python eval.py --target "$target" --bench e2e ${EVAL_ARGS:-}
.venv/bin/python plot/pareto.py --target "$target" --bench e2e
.venv/bin/python plot/table.py --target "$target" --bench e2e
