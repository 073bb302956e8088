"""Data for training: a corpus of any size in constant memory and bounded disk space, with exact O(1) resume.

The modules form a chain, and each one knows only the one before it:

    spec -> listing -> bytefile -> decompress -> formats -> documents -> encode -> writer -> cache -> loader

`builder` is the process that runs the first eight of them; `loader` is what a training loop uses. They share one
directory (docs/guides/data.md) and never call each other. Nothing in this package knows about runs or sessions:
progress goes to a plain callback (`progress.Reporter`).
"""
