"""Readers, one module per format: each returns the texts in a file's bytes. `formats` assigns readers to files."""
