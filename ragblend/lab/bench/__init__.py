"""Benchmarks: each prints a hardware card, a table and one line of JSON.

`ttft` compares full prefill, prefix caching, full reuse and blend by time to first token, `throughput` by requests per
second. `load` measures how much loading from disk lengthens a blend. `ingest` compares ingestion with the model's
prefill alone. `common.workloads` creates the models and prompts. Importing this package does not load torch.
"""
