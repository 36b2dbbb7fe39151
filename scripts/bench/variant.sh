#!/usr/bin/env bash
# The decode benchmark under other conditions (paper, Figures 12, 13 and 16), then its figure:
#   scripts/bench/variant.sh smollm2 t1|directional|k7|k15|dspark_wcs
#
#   t1           temperature 1, with the drafters of runs/TARGET
#   directional  a ForeSpark drafter with causal blocks
#   k7, k15      drafters of at most 7 or 15 draft tokens
#   dspark_wcs   a directional DSpark drafter, served as dspark and with planned lengths
#
# Other drafters are trained, calibrated and profiled first, in runs/TARGET-VARIANT, on the
# corpus of runs/TARGET. Records go to runs/TARGET/bench/decode_VARIANT. Resumes.
#   TRAIN_ARGS="--max-steps 400"   more arguments for train.py
#   EVAL_ARGS="bench.loads=[1,8]"  more arguments for eval.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=scripts/stage.sh
source scripts/stage.sh
variant=${2:-}
own="runs/$target-$variant"
shape=() arms=ar,dflash2,dspark,forespark_nojs,forespark drafters=(forespark dspark)
case $variant in
t1) drafters=() own="runs/$target" shape=(bench.temperature=1) ;;
directional) shape=(drafter.directional=true) drafters=(forespark) ;;
k7 | k15) shape=("drafter.num_speculative_tokens=${variant#k}") ;;
dspark_wcs) shape=(drafter.directional=true) drafters=(dspark) arms=ar,dspark,dspark_wcs ;;
*)
    echo "variant.sh: got '$variant', want t1, directional, k7, k15 or dspark_wcs" >&2
    exit 2
    ;;
esac
place=("run_dir=$own" "train.data=[runs/$target/corpus]" "${shape[@]}")
for drafter in "${drafters[@]}"; do
    # shellcheck disable=SC2086
    .venv/bin/python train.py --target "$target" --drafter "$drafter" "${place[@]}" ${TRAIN_ARGS:-}
    .venv/bin/python calibrate.py --target "$target" --drafter "$drafter" "${place[@]}"
done
case $variant in
t1) ;;
dspark_wcs) .venv/bin/python curves.py --target "$target" --drafter dspark "${place[@]}" ;;
*) .venv/bin/python curves.py --target "$target" "${place[@]}" ;;
esac
out="runs/$target/bench/decode_$variant"
# shellcheck disable=SC2086
.venv/bin/python eval.py --target "$target" --bench decode --arm "$arms" --out "$out" "${place[@]}" ${EVAL_ARGS:-}
for figure in pareto table; do
    .venv/bin/python "plot/$figure.py" --target "$target" --records "$out"
done
