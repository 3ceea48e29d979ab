"""Releases of vLLM: what ragblend uses of them."""
