"""Workers' half of the connector: fuses stored KV into vLLM's paged cache through vLLM's own layers."""
