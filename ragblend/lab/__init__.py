"""Measure and look: benchmarks, quality, calibration, machine profile, storage plan, traffic, explain, the page."""
