"""The file format: where a run's files are, how they are written, read and repaired.

All other parts of Jackline exchange data through these files and in no other way. Imports neither torch nor other
dependencies; docs/RUN_FORMAT.md describes the same contract in prose.
"""
