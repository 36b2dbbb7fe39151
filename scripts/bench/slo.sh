#!/usr/bin/env bash
# SLO benchmark: an open loop of conversations at several arrival rates, then its
# figures:  scripts/bench/slo.sh smollm2
#
#   EVAL_ARGS="--limit 32 bench.rounds=1"   more arguments for eval.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=scripts/stage.sh
source scripts/stage.sh
# shellcheck disable=SC2086
.venv/bin/python eval.py --target "$target" --bench slo ${EVAL_ARGS:-}
.venv/bin/python plot/slo.py --target "$target"
