"""Generators of docs/structure.md: the picture of the layers, and the trace of one request."""
