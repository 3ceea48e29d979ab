"""Ingestion: updates an index from folders, prefills new chunks, and deletes the KV of removed ones."""
