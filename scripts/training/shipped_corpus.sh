#!/usr/bin/env bash
# Corpus of the shipped embedded drafters: this project's starter prompts, prompts that the
# target writes itself, and the public prompts of ../shared/data (or SHARED_DATA), all answered
# by the target. Benchmark prompts are left out. Short prompts and answers only: the target
# loops past some 128 tokens, and every prompt token costs a pass of the target in training.
# Resumes; about an hour on two cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
usage="usage: scripts/training/shipped_corpus.sh [ARGUMENTS OF data.py]"
case ${1:-} in
-h | --help) echo "$usage" && exit ;;
esac
data=${SHARED_DATA:-../shared/data}
[[ -x .venv/bin/python ]] || {
    echo "shipped_corpus.sh: no .venv here; run ./setup.sh first" >&2
    exit 2
}
[[ -d $data ]] || {
    echo "shipped_corpus.sh: no folder $data with the public prompts; set SHARED_DATA" >&2
    exit 2
}
train=(ultrachat_eval.jsonl sharegpt_toolcall_glaive.jsonl oasst1_multiturn_en.jsonl
    "gsm8k_test.jsonl#0:800" "math500.jsonl#0:300" "mbpp_sanitized_test.jsonl#0:150")
held_out=(mt_bench.jsonl spec_bench.jsonl humaneval.jsonl sharegpt_multiturn_dpo_demo.jsonl
    oasst_prompts_en.jsonl "gsm8k_test.jsonl#800:" "math500.jsonl#300:"
    "mbpp_sanitized_test.jsonl#150:")
sources=(--source starter)
for name in "${train[@]}"; do sources+=(--source "file:$data/$name"); done
exclude="starter:bench,starter:calibration,starter:conversations,starter:questions"
for name in "${held_out[@]}"; do exclude="$exclude,'file:$data/$name'"; done
exec .venv/bin/python data.py --target smollm2 "${sources[@]}" --source magpie "data.exclude=[$exclude]" \
    data.max_prompt_tokens=256 data.max_tokens=192 "$@"
