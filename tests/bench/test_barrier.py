"""The decode barrier on real vLLM schedulers, with a fake model that emits one token.

Each case is a way in which a barrier could hang an engine or leak a decode step into the
prefill phase: chunked prompts, a request that ends at its first token, an abort, a cache
or ``max_num_seqs`` too small for the batch, and the batch after the batch.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm")

from forespark.serving.barrier import BarrierScheduler, DecodeBarrier

EOS = 2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A checkpoint directory with a configuration and no weights: schedulers need no more."""
    path = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 128,
        "max_position_embeddings": 512,
        "eos_token_id": EOS,
    }
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


class Engine:
    """Drives a scheduler as the engine core does, with tokens made up."""

    def __init__(
        self,
        model_dir,
        *,
        asynchronous=False,
        blocks=200,
        max_num_seqs=16,
        max_tokens_per_step=64,
        additional=None,
    ):
        import torch
        from vllm.config import (
            CacheConfig,
            DeviceConfig,
            ModelConfig,
            SchedulerConfig,
            VllmConfig,
            set_current_vllm_config,
        )
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
        )
        from vllm.v1.structured_output import StructuredOutputManager

        config = VllmConfig(
            model_config=ModelConfig(model=model_dir, skip_tokenizer_init=True, dtype="float32"),
            scheduler_config=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_tokens_per_step,
                max_model_len=512,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            cache_config=CacheConfig(block_size=16, enable_prefix_caching=False),
            device_config=DeviceConfig("cpu"),
            additional_config=additional or {},
        )
        config.scheduler_config.async_scheduling = asynchronous  # the CPU platform clears it
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=16, dtype=torch.float32)
        kv = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        with set_current_vllm_config(config):
            self.scheduler = BarrierScheduler(
                vllm_config=config,
                kv_cache_config=kv,
                structured_output_manager=StructuredOutputManager(config),
                block_size=16,
            )
        self.asynchronous = asynchronous
        self.in_flight = []

    def add(self, name, prompt=20, max_tokens=8, barrier=None):
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        extra = None if barrier is None else {"forespark_barrier": barrier}
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, extra_args=extra, ignore_eos=True
        )
        self.scheduler.add_request(Request(name, [5] * prompt, params, None))

    def abort(self, name):
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self):
        """One engine step; returns {request: tokens scheduled} and (prefill, decode) names."""
        output = self.scheduler.schedule()
        decoding = {
            name
            for name in output.num_scheduled_tokens
            if name in self.scheduler.requests
            and self.scheduler.requests[name].num_computed_tokens
            > self.scheduler.requests[name].num_prompt_tokens
        }
        sampling = [
            n
            for n in output.num_scheduled_tokens
            if not self.scheduler.requests[n].is_prefill_chunk
        ]
        self.in_flight.append((output, sampling))
        # Asynchronous scheduling plans one step ahead of the tokens it has seen.
        while self.in_flight and len(self.in_flight) > (1 if self.asynchronous else 0):
            self._finish(*self.in_flight.pop(0))
        return output.num_scheduled_tokens, decoding

    def _finish(self, output, sampling):
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={n: i for i, n in enumerate(names)},
                sampled_token_ids=[[7] if n in sampling else [] for n in names],
            ),
        )

    def run_until_decoding(self, limit=60):
        """Step until some request decodes; returns its step's decoding set and the count."""
        for count in range(limit):
            scheduled, decoding = self.step()
            if decoding:
                return decoding, set(scheduled), count
        raise AssertionError("nothing decoded: the barrier hangs")

    def drain(self, limit=200):
        for _ in range(limit):
            if not self.scheduler.get_num_unfinished_requests():
                return
            self.step()
        raise AssertionError("requests left: the barrier hangs")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_decode_together_and_prefill_is_not_mixed(model_dir, asynchronous):
    engine = Engine(model_dir, asynchronous=asynchronous)
    for i in range(4):
        engine.add(f"r{i}", prompt=50 + i, barrier=4)  # 64 tokens a step: chunked prefills
    decoding, scheduled, _ = engine.run_until_decoding()
    assert decoding == scheduled == {"r0", "r1", "r2", "r3"}
    engine.drain()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_waits_for_requests_that_arrive_late(model_dir, asynchronous):
    engine = Engine(model_dir, asynchronous=asynchronous)
    engine.add("r0", barrier=3)
    engine.add("r1", barrier=3)
    for _ in range(10):
        assert not engine.step()[1]
    engine.add("r2", prompt=100, barrier=3)
    assert engine.run_until_decoding()[0] == {"r0", "r1", "r2"}
    engine.drain()


def test_later_requests_run_freely_and_the_next_batch_is_held(model_dir):
    engine = Engine(model_dir)
    engine.add("a0", barrier=2)
    engine.add("a1", barrier=2)
    engine.run_until_decoding()
    engine.add("late", max_tokens=3, barrier=2)
    engine.drain()
    engine.add("b0", barrier=2)
    for _ in range(5):
        assert not engine.step()[1]
    engine.add("b1", barrier=2)
    assert engine.run_until_decoding()[0] == {"b0", "b1"}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_request_that_ends_at_its_first_token(model_dir, asynchronous):
    engine = Engine(model_dir, asynchronous=asynchronous)
    engine.add("short", max_tokens=1, barrier=3)
    engine.add("r1", barrier=3)
    engine.add("r2", barrier=3)
    assert engine.run_until_decoding()[0] == {"r1", "r2"}
    engine.drain()


def test_aborted_member_does_not_block(model_dir):
    engine = Engine(model_dir)
    engine.add("r0", barrier=2)
    engine.step()
    engine.add("gone", prompt=300, barrier=2)
    engine.step()  # only part of its prompt
    engine.abort("gone")
    assert engine.run_until_decoding()[0] == {"r0"}


def test_batch_given_up_before_it_was_full(model_dir):
    engine = Engine(model_dir)
    engine.add("r0", barrier=4)
    engine.step()
    engine.abort("r0")
    engine.add("n0", barrier=2)
    engine.add("n1", barrier=2)
    assert engine.run_until_decoding()[0] == {"n0", "n1"}


def test_too_few_slots_releases_with_a_warning(model_dir, caplog_vllm):
    engine = Engine(model_dir, max_num_seqs=2)
    for i in range(4):
        engine.add(f"r{i}", barrier=4)
    assert engine.run_until_decoding()[0] == {"r0", "r1"}
    assert "released early" in caplog_vllm.text
    engine.drain()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_cache_too_small_releases_with_a_warning(model_dir, asynchronous, caplog_vllm):
    engine = Engine(model_dir, asynchronous=asynchronous, blocks=12)  # 192 tokens, one is null
    for i in range(4):
        engine.add(f"r{i}", prompt=60, barrier=4)
    assert engine.run_until_decoding()[0]
    assert "released early" in caplog_vllm.text
    engine.drain()


def test_without_a_barrier_decoding_starts_at_once(model_dir):
    engine = Engine(model_dir)
    engine.add("r0", prompt=60)
    engine.add("r1", prompt=60, barrier=1)
    assert engine.run_until_decoding()[0] == {"r0"}


def test_default_from_additional_config(model_dir):
    engine = Engine(model_dir, additional={"forespark": {"barrier": 2}})
    engine.add("r0", prompt=60)
    engine.add("r1", prompt=60)
    assert engine.run_until_decoding()[0] == {"r0", "r1"}


def test_bad_value_is_ignored(model_dir, caplog_vllm):
    engine = Engine(model_dir)
    engine.add("r0", barrier="many")
    assert engine.run_until_decoding()[0] == {"r0"}
    assert "want a whole number" in caplog_vllm.text


def test_mixed_sizes_take_the_largest():
    barrier = DecodeBarrier()
    barrier.join("a", 2)
    barrier.join("b", 3)
    barrier.update(lambda name: True)
    assert barrier.holds("a") and not barrier.released
    barrier.join("c", 3)
    barrier.update(lambda name: True)
    assert not barrier.holds("a")


@pytest.fixture
def caplog_vllm(caplog):
    """vLLM's loggers do not propagate to the root, where pytest listens."""
    import logging

    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
