"""Search over an index's vectors, by FAISS."""
