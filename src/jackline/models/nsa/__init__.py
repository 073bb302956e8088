"""Native Sparse Attention: a language model whose attention reads averages, chosen blocks and a window."""
