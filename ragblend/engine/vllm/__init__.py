"""Engine on unmodified vLLM: the KV connector, and engines over it. Only this package imports vllm."""
