#!/usr/bin/env bash
# Math and code benchmark: a closed loop of single-turn questions, every arm at every load, then
# its figures:  scripts/bench/mathcode.sh smollm2
#
# Questions: those of the target's configuration; for smollm2, where they are there, also the
# public ones in ../shared/data (or SHARED_DATA), held out of training.
#   EVAL_ARGS="--limit 32 bench.rounds=1"   more arguments for eval.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=scripts/stage.sh
source scripts/stage.sh
data=${SHARED_DATA:-../shared/data}
sources=()
if [[ $target == smollm2 && -d $data ]]; then
    sets="starter:questions,'file:$data/gsm8k_test.jsonl#800:','file:$data/math500.jsonl#300:'"
    sets+=",'file:$data/humaneval.jsonl','file:$data/mbpp_sanitized_test.jsonl#150:'"
    sources=("stream.questions=[$sets]")
fi
# shellcheck disable=SC2086
.venv/bin/python eval.py --target "$target" --bench mathcode "${sources[@]}" ${EVAL_ARGS:-}
.venv/bin/python plot/pareto.py --target "$target" --bench mathcode
.venv/bin/python plot/table.py --target "$target" --bench mathcode
