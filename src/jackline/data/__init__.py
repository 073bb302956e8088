"""Data: sources, tokenizer, pack, cache, order, loader."""
