"""Additions of `ragblend serve` to vLLM's HTTP server: routes for documents and the store, API keys, reports."""
