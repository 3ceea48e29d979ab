"""Measurements behind the design and the figures of RESULTS.md; results are in `data/results`. Not in the wheel."""
