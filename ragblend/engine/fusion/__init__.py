"""Fusion of stored KV into one prompt: selection and recompute of tokens. Depends on torch, not on frameworks."""
