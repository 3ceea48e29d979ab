"""Benchmarks: each prints a hardware card, a table and one line of JSON.

`ttft` compares full prefill, prefix caching, full reuse and blend by time to first token, `ttft_grid` over lengths;
`load` asks whether loading hides behind recompute, `ingest` whether ingestion keeps the model busy. `workloads` makes
the models and prompts they run on. Nothing heavy is imported before a benchmark is called.
"""
