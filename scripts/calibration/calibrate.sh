#!/usr/bin/env bash
# Calibrate both estimators and measure latencies:  scripts/calibration/calibrate.sh smollm2
#
#   CALIBRATE_ARGS="--limit 64"   more arguments for calibrate.py
#   CURVES_ARGS="--limit 4"       more arguments for curves.py
#   DRAFTERS="forespark dspark"   which drafters to calibrate
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=scripts/stage.sh
source scripts/stage.sh
for drafter in ${DRAFTERS:-forespark dspark}; do
    # shellcheck disable=SC2086
    .venv/bin/python calibrate.py --target "$target" --drafter "$drafter" ${CALIBRATE_ARGS:-}
done
# shellcheck disable=SC2086
.venv/bin/python curves.py --target "$target" ${CURVES_ARGS:-}
