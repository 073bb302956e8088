"""Data: any size of corpus, constant memory, bounded disk, exact O(1) resume.

Reads downwards, each step only knows the one before it:

    spec -> listing -> bytefile -> decompress -> formats -> documents -> encode -> writer -> cache -> loader

`builder` is the process that runs the first eight of them; `loader` is what a training loop uses. They share one
directory (docs/guides/data.md) and never call each other. Nothing here knows about runs or sessions: progress goes
to a plain callback (`progress.Reporter`).
"""
