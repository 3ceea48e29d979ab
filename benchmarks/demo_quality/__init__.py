"""The embedded model's study: every rule, ratio and budget on held-out stories, and a corpus end to end.

    python -m benchmarks.demo_quality                                     # data/results/quality.json, docs/quality.png
    python -m benchmarks.demo_quality --corpus ragblend/demo/records           # data/results/quality-corpus.json

What wins on a model of 1.3 million parameters decides nothing: `ragblend bench quality` measures a real one. This is
how the figures of `data/results/quality*.json` came about, and what the demo model is held to. Read `study` first.
"""
