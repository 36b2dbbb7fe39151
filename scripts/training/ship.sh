#!/usr/bin/env bash
# Put a run's drafter and its calibration where a fresh clone finds them: models/TARGET-DRAFTER.
# Refuses what would not serve: a drafter without calibration, or more than 25 MB.
#   scripts/training/ship.sh smollm2 forespark
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
usage="usage: scripts/training/ship.sh TARGET forespark|dspark"
target=${1:?$usage} drafter=${2:?$usage}
run=runs/$target
calibration=$run/calibration.json
[[ $drafter == forespark ]] || calibration=$run/calibration-$drafter.json
for needed in "$run/drafters/$drafter/model.safetensors" "$calibration"; do
    [[ -e $needed ]] || { echo "ship.sh: $needed is missing; train and calibrate first" >&2; exit 2; }
done
grep -q "$(sha256sum "$run/drafters/$drafter/model.safetensors" | cut -d' ' -f1)" "$calibration" || {
    echo "ship.sh: $calibration was fitted for other weights; run calibrate.py again" >&2
    exit 2
}
out=models/$target-$drafter
staged=$(mktemp -d "models/.ship.XXXXXX")
trap 'rm -rf "$staged"' EXIT
cp -R "$run/drafters/$drafter/." "$staged"
mkdir -p "$staged/forespark"
cp "$calibration" "$staged/forespark/calibration.json"
bytes=$(du -sb "$staged" | cut -f1)
((bytes <= 25000000)) || { echo "ship.sh: $drafter takes $bytes bytes, want 25 MB at most" >&2; exit 2; }
chmod -R u+rwX,go+rX "$staged"
rm -rf "$out"
mv "$staged" "$out"
echo "$out ($bytes bytes)"
