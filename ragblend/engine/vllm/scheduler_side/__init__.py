"""Scheduler's half of the connector: finds stored chunks in prompts, and decides what is loaded and recomputed."""
