"""Child process of the engine tests: one vLLM engine, answers written as JSON.

``python engine_child.py MODEL OUT RUNNER``: RUNNER is 1 or 2, or ``hidden`` for the server
side of online training. A process of its own, because the tests run with Triton's
interpreter and an engine must not.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

PROMPTS = [
    "Name three rivers in Europe and one lake.",
    "Write a short poem about rain.",
    "What is 17 times 23? Think step by step.",
    "Explain recursion to a child.",
    "Repeat the word banana eight times.",
    "List the months of the year in order.",
    "Why is the sky blue? Answer in two sentences.",
    "Translate 'good morning' to French, German and Spanish.",
]


def answer(model: str) -> dict:
    """Greedy answers, plain and with every kind of logit processing."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = LLM(model, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=8)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    plain = SamplingParams(temperature=0, max_tokens=24)
    options = [
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
        {"logit_bias": {500: 4.0, 260: -6.0}, "min_tokens": 12},
        {"bad_words": ["the", "three"]},
        {"allowed_token_ids": list(range(400, 700))},
        {"logprobs": 3, "prompt_logprobs": 2},
        {"structured_outputs": StructuredOutputsParams(choice=["yes", "no", "perhaps"])},
        {"temperature": 0.8, "min_p": 0.9999, "seed": 3},
        {"temperature": 0.8, "top_k": 1, "seed": 3},
    ]
    fancy = [SamplingParams(**{"temperature": 0, "max_tokens": 16, **o}) for o in options]
    first = llm.chat(chats, plain, use_tqdm=False)
    second = llm.chat(chats, fancy, use_tqdm=False)
    logprobs = second[4].outputs[0].logprobs
    return {
        "plain": [list(o.outputs[0].token_ids) for o in first],
        "fancy": [list(o.outputs[0].token_ids) for o in second],
        "logprobs": [sorted(v.logprob for v in step.values()) for step in logprobs],
        "prompt_logprobs": [
            sorted(v.logprob for v in step.values()) for step in second[4].prompt_logprobs if step
        ],
    }


def hidden_states(model: str, folder: str) -> dict:
    """One 400-token prompt through the hidden-state connector; shapes and layer count."""
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=2,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 8, 15, 22, 28, 30]}
            },
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": folder},
        },
    )
    tokens = [100 + 11 * i for i in range(400)]
    output = llm.generate(
        {"prompt_token_ids": tokens}, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False
    )[0]
    path = Path(output.kv_transfer_params["hidden_states_path"])
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        llm.llm_engine.step()  # the step after a request's last one writes its states
        time.sleep(0.1)
    time.sleep(1)  # a writer thread fills the file
    saved = load_file(path)
    return {
        "hidden_states": list(saved["hidden_states"].shape),
        "finite": bool(saved["hidden_states"].isfinite().all()),
        "token_ids": saved["token_ids"].tolist() == tokens,
    }


def main() -> None:
    model, out, runner = sys.argv[1:]
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "2" else "0"
    folder = os.path.dirname(out)
    result = hidden_states(model, folder) if runner == "hidden" else answer(model)
    with open(out, "w", encoding="utf-8") as target:
        json.dump(result, target)


if __name__ == "__main__":
    main()
