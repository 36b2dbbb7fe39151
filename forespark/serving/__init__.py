"""Serving: the drafter, the scheduler hooks and the CPU path inside vLLM.

The only room that imports vllm. Importing this package itself imports nothing heavy, so
that vLLM's plugin loader stays cheap.
"""
