"""The texts that commands print. No side effects."""
