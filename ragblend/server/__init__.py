"""What `ragblend serve` adds to vLLM's HTTP server: documents, what is stored, API keys at the door, reports."""
