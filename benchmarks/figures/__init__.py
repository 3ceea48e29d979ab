"""The CacheBlend paper's figures (Yao et al., EuroSys 2025) on your model: `python -m benchmarks.figures NAME`."""
