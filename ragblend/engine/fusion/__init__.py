"""Stored KV into one prompt: which tokens to recompute, and how. Knows torch and Protocols, no framework."""
