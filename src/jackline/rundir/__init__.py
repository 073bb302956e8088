"""The file format: where a run's files are, how they are written, read and healed.

Everything else in Jackline meets here and nowhere else. Torch-free and dependency-free; docs/RUN_FORMAT.md is
the same contract in prose.
"""
