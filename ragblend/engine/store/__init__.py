"""Chunk KV under its key: tiers, files, signatures. Knows torch and bytes, no framework."""
