"""The catalogue: one database per store with its documents, chunks, vectors, token ids and keys of entries."""
