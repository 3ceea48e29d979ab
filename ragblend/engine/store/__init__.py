"""Chunk KV by key: tiers, chunk files, signatures. Depends on torch, not on models or frameworks."""
