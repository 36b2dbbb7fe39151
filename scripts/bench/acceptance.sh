#!/usr/bin/env bash
# Acceptance length of both drafters by set of prompts, then its table:
#   scripts/bench/acceptance.sh smollm2
#
# Sets: our own benchmark prompts, and the public ones in ../shared/data (or SHARED_DATA)
# where they are there: categories of Spec-Bench, math and code, held out of training.
#   EVAL_ARGS="--limit 16"   more arguments for eval.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=scripts/stage.sh
source scripts/stage.sh
data=${SHARED_DATA:-../shared/data}
sets="'starter=starter:bench'"
if [[ -d $data ]]; then
    for category in writing roleplay reasoning math coding extraction stem humanities \
        translation summarization qa math_reasoning rag; do
        sets+=",'$category=file:$data/spec_bench.jsonl@$category'"
    done
    sets+=",'gsm8k=file:$data/gsm8k_test.jsonl#800:','math500=file:$data/math500.jsonl#300:'"
    sets+=",'humaneval=file:$data/humaneval.jsonl','mbpp=file:$data/mbpp_sanitized_test.jsonl#150:'"
fi
# shellcheck disable=SC2086
.venv/bin/python eval.py --target "$target" --bench acceptance "bench.sets=[$sets]" ${EVAL_ARGS:-}
.venv/bin/python plot/acceptance.py --target "$target"
