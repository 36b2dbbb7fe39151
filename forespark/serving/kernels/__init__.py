"""Triton kernels of the drafter's variable-length blocks, each the twin of a plain form.

``queries`` fills the drafter's inputs (``packed.prepare_queries``), ``conv`` is the grouped
convolution (``conv.grouped_conv``), ``walk`` the selector walk with the post-draft
confidence (``selector.walk``). Plain forms run on a CPU, kernels on a GPU.
Importing them needs torch and triton, not vllm. Nothing here waits for the device, and
sizes that change from step to step are read from device memory, so every launch may be
captured. Tested in Triton's interpreter and compiled for sm_90; not run on a GPU yet.
"""
