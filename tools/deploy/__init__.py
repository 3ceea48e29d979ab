"""Download of the tools that check deploy/: helm, promtool, Kubernetes schemas and vLLM's router."""
