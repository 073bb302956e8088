"""The cache directory: eras of tokens, its readers and its writer."""
