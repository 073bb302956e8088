"""One typed record for each JSON file of a run: what it may contain, how it is read, who writes it.

A reader never raises: a field that is absent or has the wrong type counts as unknown. docs/RUN_FORMAT.md says what
the fields mean.
"""
