"""The CPU path of vLLM's V2 model runner: twins of its Triton kernels and engine hooks."""
