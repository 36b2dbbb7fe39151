#!/usr/bin/env bash
# The kernels on a GPU: tests, comparison with the plain forms at real sizes, times.
#
#   scripts/gpu_check.sh           on a CUDA machine with torch, triton, numba and pytest; no vLLM
#   scripts/gpu_check.sh --dry     the same at tiny sizes in Triton's interpreter, anywhere
#   scripts/gpu_check.sh --compile no GPU: compile the kernels of those sizes for sm_80 and sm_90
#
# Leaves one record, gpu_check.json, in $OUT, by default results/gpu. Ends with 1 if a test or a
# comparison failed. PYTHON names another interpreter than that of .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
[[ -x "$python" || -n "${PYTHON:-}" ]] || python=python3
out=${OUT:-results/gpu}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
tests=(
  tests/fore_d/test_kernels.py tests/fore_d/test_split.py tests/fore_d/test_survival_envelope.py
  tests/serving/kernels tests/serving/test_conv.py tests/serving/test_packed.py
  tests/serving/test_selector.py tests/models/test_estimators.py
)
mode=${1:-}
case "$mode" in
  "" | --compile) unset TRITON_INTERPRET ;;
  --dry) export TRITON_INTERPRET=1 ;;
  *)
    sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
if [[ "$mode" == --compile ]]; then
  exec "$python" scripts/gpu_check.py --compile --out "$out/gpu_compile.json"
fi
report=$(mktemp)
trap 'rm -f "$report"' EXIT
status=0
"$python" -m pytest -q -p no:cacheprovider --junitxml "$report" "${tests[@]}" || status=1
"$python" scripts/gpu_check.py $mode --tests "$report" --out "$out/gpu_check.json" || status=1
exit "$status"
