"""`bench ttft` compares full prefill, prefix caching, full reuse and blend by time to first token.

`common` has what `quality` and the studies in `benchmarks/` use, too: options, models and prompts, the hardware card,
output. Importing this package does not load torch.
"""
