"""A table of training loops as people write them; each is interrupted and compared (`scripts/torture loops`)."""
