"""The embedded model and its world: generator, sample corpus, tokenizer, trainer and weights."""
