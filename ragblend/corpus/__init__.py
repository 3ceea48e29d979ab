"""Documents before any model sees them: reading folders and files, catalogues of chunks and texts, embedders."""
