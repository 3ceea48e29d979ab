"""Shared parts of the benchmarks: configurations, workloads, the hardware card and output."""
