#!/usr/bin/env bash
# Corpus, then drafters, for one target:  scripts/training/train.sh smollm2
#
#   DATA_ARGS="--limit 2000"      more arguments for data.py
#   TRAIN_ARGS="--max-steps 20"   more arguments for train.py
#   DRAFTERS="forespark dspark"   which drafters to train, in this order
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=scripts/stage.sh
source scripts/stage.sh
# The *_ARGS are lists of words on purpose.
# shellcheck disable=SC2086
.venv/bin/python data.py --target "$target" ${DATA_ARGS:-}
for drafter in ${DRAFTERS:-forespark dspark}; do
    # shellcheck disable=SC2086
    .venv/bin/python train.py --target "$target" --drafter "$drafter" ${TRAIN_ARGS:-}
done
