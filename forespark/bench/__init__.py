"""Benchmarks: a served endpoint and a workload in, typed records out."""
