"""From files anywhere to documents in one fixed order."""
