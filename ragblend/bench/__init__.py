"""Benchmarks: each prints a hardware card, a table and one line of JSON.

`ttft` compares full prefill, prefix caching, full reuse and blend by time to first token; `workloads` makes the
models and prompts it runs on. Nothing heavy is imported before a benchmark is called.
"""
