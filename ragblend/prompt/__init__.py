"""Text to token ids, the only place where that happens."""
