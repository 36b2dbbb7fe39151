"""What the scheduler benchmark times is what serves: stock vLLM's manager and ours."""

from __future__ import annotations

import json
import subprocess
import sys

CODE = """
import json
import numpy as np
from forespark.bench.recorded import synthetic_drafts
from forespark.bench.scheduler import prices
from forespark.fore_d.envelope import scores_host
from forespark.fore_d.schedule import plan, replan_budget
from forespark.serving.deciders import step_deciders

n, K = 40, 5
drafts = synthetic_drafts(np.random.default_rng(2), n, K)
scores = scores_host(drafts.pre.sum(axis=2)).astype(np.float32)
alive = drafts.pre[:, K - 1]
acceptance = alive / np.concatenate([np.ones((n, 1)), alive[:, :-1]], axis=1)
costs = prices(K, n)
found = {name: call() for name, call in step_deciders(scores, acceptance, costs).items()}
ranked = np.sort(alive.reshape(-1))[::-1]
rates = [(n + ranked[:b].sum()) / (costs.draft_ms(n * (1 + K)) + costs.verify_ms(n + b, n))
         for b in range(n * K + 1)]
ours = replan_budget(scores, n, n, costs, n * K, n * (1 + K))
print(json.dumps({"found": found, "stock": int(np.argmax(rates)), "ours": ours}))
"""


def test_deciders_decide_as_their_formulas(root):
    """In a process of its own: vLLM's CPU worker changes torch for good."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    found = result["found"]
    assert found["stock"] == result["stock"] > 0
    assert found["step"] == found["step_host_split"] == result["ours"] > 0
