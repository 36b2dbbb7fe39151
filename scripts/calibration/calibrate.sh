#!/usr/bin/env bash
# Calibrate both estimators and measure latencies:  scripts/calibration/calibrate.sh smollm2
#
#   CALIBRATE_ARGS="--limit 64"   more arguments for calibrate.py
#   CURVES_ARGS="--limit 4"       more arguments for curves.py
#   DRAFTERS="forespark dspark"   which drafters to calibrate
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
usage="usage: scripts/calibration/calibrate.sh TARGET"
case ${1:-} in
-h | --help) echo "$usage" && exit ;;
"" | -*) echo "$usage" >&2 && exit 2 ;;
esac
[[ -x .venv/bin/python ]] || { echo "calibrate.sh: no .venv here; run ./setup.sh first" >&2; exit 2; }
target=$1
for drafter in ${DRAFTERS:-forespark dspark}; do
    # shellcheck disable=SC2086
    .venv/bin/python calibrate.py --target "$target" --drafter "$drafter" ${CALIBRATE_ARGS:-}
done
# shellcheck disable=SC2086
.venv/bin/python curves.py --target "$target" ${CURVES_ARGS:-}
