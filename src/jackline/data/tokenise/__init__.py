"""From documents to tokens."""
