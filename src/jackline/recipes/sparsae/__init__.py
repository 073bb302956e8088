"""SparsAE: a language model with a fixed share of its weights switched off."""
