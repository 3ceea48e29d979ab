"""Documents before a model processes them: reading folders and files, catalogues of chunks and texts, embedders."""
