"""Following a folder: what changed, what to forget, what to rewrite."""
