"""The engine on stock vLLM: the only place that imports vllm."""
