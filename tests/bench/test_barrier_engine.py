"""The decode barrier in a real engine: the first decode step contains the whole batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine

# Runs in a process of its own: an engine's settings are environment variables that are
# read at import. Prompts of different lengths need several prefill steps of 64 tokens.
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=8,
          max_num_batched_tokens=64, enable_prefix_caching=False,
          scheduler_cls="forespark.serving.barrier.BarrierScheduler")
scheduler = llm.llm_engine.engine_core.engine_core.scheduler
steps, schedule = [], scheduler.schedule

def watched(*args, **kwargs):
    output = schedule(*args, **kwargs)
    requests = [scheduler.requests[name] for name in output.num_scheduled_tokens]
    decoding = [r.num_computed_tokens > r.num_prompt_tokens for r in requests]
    steps.append([len(requests), sum(decoding)])
    return output

scheduler.schedule = watched
params = [SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True,
                         extra_args={"forespark_barrier": 4} if barrier else None)
          for barrier in (True,) * 4 + (False,) * 4]
prompts = [{"prompt_token_ids": list(range(100, 100 + n))} for n in (20, 90, 50, 130)]
outputs, runs = [], []
for part in (params[:4], params[:4], params[4:]):
    steps.clear()
    answers = llm.generate(prompts, part, use_tqdm=False)
    outputs.append([list(a.outputs[0].token_ids) for a in answers])
    runs.append([s for s in steps if s[0]])
print("RESULT " + json.dumps({"runs": runs, "outputs": outputs}))
"""


def test_first_decode_step_contains_the_batch(root):
    model = root / "models" / "smollm2"
    if not (model / "config.json").exists():
        pytest.skip("models/smollm2 is not there; ./setup.sh converts it")
    env = os.environ | {
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_PLUGINS": "",  # the barrier needs nothing else of ours
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model)],
        env=env, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    result = json.loads(lines[0].removeprefix("RESULT "))
    for steps in result["runs"][:2]:  # the second batch is held like the first
        decoding = [step for step in steps if step[1]]
        assert decoding[0] == [4, 4]
        assert all(step[1] in (0, step[0]) for step in steps)  # never mixed with a prefill
        assert len(decoding) == 3  # four tokens each, the first of them from the prefill
    free = result["runs"][2]
    assert any(0 < step[1] < step[0] for step in free)  # without it, they do mix
    # Holding a request does not change its answer.
    assert result["outputs"][0] == result["outputs"][1] == result["outputs"][2]
