"""Pairs of antibody and antigen with a measured affinity: reading, splitting, and embeddings computed once.

The door is `prepared.prepare_affinity`. Nothing here trains; the encoders are frozen and never in a checkpoint.
"""
