#!/usr/bin/env bash
# The whole pipeline on the embedded target, scaled to minutes on two CPU cores:
# set-up, corpus, training and calibration of a throw-away drafter (they prove the stages),
# then latency tables, the decode benchmark and figures with the shipped drafters.
#
#   scripts/smoke.sh            run again: finished stages are reused
#   rm -r runs/smollm2/smoke    start the throw-away part afresh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
begin=$SECONDS
python=.venv/bin/python
target=smollm2
scratch=runs/$target/smoke # run_dir of the throw-away drafter
records=runs/$target/bench/smoke # apart from a full decode run, whose settings differ
figure=runs/$target/figures/pareto.png

step() { # title, command...
    echo "== $1 ($((SECONDS - begin)) s)"
    shift
    "$@"
}

# Runs a stage of the throw-away drafter once; the mark is kept beside its output.
once() { # name, command...
    local mark=$scratch/.done-$1
    if [[ -e $mark ]]; then
        echo "== $1: reused"
        return
    fi
    step "$@"
    touch "$mark"
}

step "set-up" ./setup.sh
mkdir -p "$scratch"
once data $python data.py --target $target --source starter --limit 24 run_dir=$scratch \
    data.max_tokens=64 data.concurrency=24
once train $python train.py --target $target --drafter forespark --max-steps 4 run_dir=$scratch \
    train.max_anchors=16 train.validate_every=4 train.checkpoint_every=4
once calibrate $python calibrate.py --target $target --drafter forespark --limit 8 \
    run_dir=$scratch calibrate.max_tokens=24 calibrate.min_samples=10
step "curves" $python curves.py --target $target curves.steps_per_point=8 \
    "curves.batch_sizes=[1,8,16]"
step "decode benchmark" $python eval.py --target $target --bench decode --limit 16 \
    --arm ar,dflash2,dspark,forespark_nojs,forespark "bench.loads=[1,8]" bench.rounds=1 \
    bench.output_tokens=64 bench.min_answer_tokens=65 --out "$records"
step "Pareto figure" $python plot/pareto.py --target $target --records "$records"
step "time breakdown figure" $python plot/breakdown.py --target $target --records "$records"
[[ -s $figure ]] || { echo "smoke.sh: $figure is missing" >&2; exit 1; }
echo "smoke.sh: whole pipeline in $((SECONDS - begin)) s"
echo "$figure"
