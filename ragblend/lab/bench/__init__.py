"""Benchmarks: each prints a hardware card, a table and one line of JSON.

`ttft` compares full prefill, prefix caching, full reuse and blend by time to first token; `throughput` by requests per
second. `load` measures whether loading hides behind recompute, `ingest` whether ingestion keeps the model busy.
`common.workloads` creates their models and prompts. Nothing heavy is imported before a benchmark is called.
"""
