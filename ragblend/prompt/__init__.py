"""Prompts: messages, their token ids, and the runs of stored chunks in the ids. All tokenization is done here."""
