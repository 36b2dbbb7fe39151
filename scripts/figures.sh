#!/usr/bin/env bash
# Every figure and table from the records of one folder, which is laid out like runs/TARGET.
#   scripts/figures.sh [folder] [target]        (default: runs/TARGET smollm2)
#   scripts/figures.sh results/cpu              the committed records
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target="${2:-smollm2}"
folder="${1:-runs/$target}"
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python

records="$folder/bench/decode"
[ -d "$records" ] || [ -d "$folder/train" ] || {
  echo "figures.sh: neither $records nor $folder/train is there: run eval.py or train.py first" >&2
  exit 2
}
[ ! -e "$records/records.jsonl" ] || "$python" -m forespark.bench.compare "$records"
draw() { # figure, folder of its records
  [ -d "$2" ] || { echo "figures.sh: no $2, so no figure $1" >&2; return 0; }
  "$python" "plot/$1.py" --target "$target" --records "$2" --out "$folder/figures"
}
for figure in pareto breakdown table; do draw "$figure" "$records"; done
for other in "$folder"/bench/{e2e,mathcode,decode_*}; do
  [ -d "$other" ] || continue
  "$python" -m forespark.bench.compare "$other"
  for figure in pareto table; do draw "$figure" "$other"; done
done
for bench in slo acceptance scheduler oracle; do
  [ ! -d "$folder/bench/$bench" ] || draw "$bench" "$folder/bench/$bench"
done
draw learning "$folder/train"
[ -z "$(compgen -G "$folder/train/heads*")" ] || draw heads "$folder/train"
for figure in predictor reliability; do draw "$figure" "$folder/bench/predictor"; done
for bench in training_cost motivation; do draw $bench "$folder/bench/$bench"; done
"$python" plot/report.py --target "$target" --records "$folder" --out "$folder/figures"
