"""Measurement and inspection: benchmarks, quality, calibration, machine profile, storage plan, traffic analysis,
explanation of a prompt, and the web page."""
