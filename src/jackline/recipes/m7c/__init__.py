"""M7C: a language model with Native Sparse Attention on FineWeb-Edu."""
