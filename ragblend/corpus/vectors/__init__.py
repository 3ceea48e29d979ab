"""Where an index's vectors are searched: FAISS in a file, Qdrant or PostgreSQL. A KIND IS ADDED IN `places`."""
