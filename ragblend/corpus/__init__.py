"""Documents before the LLM reads them: reading of folders and files, cuts of texts, citations, embedders."""
