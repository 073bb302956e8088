"""A job whose machines share no folder: each keeps what its ranks save, and they send each other what is missing."""
