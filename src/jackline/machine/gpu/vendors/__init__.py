"""One module for each vendor of GPUs. A module that stands in this folder is asked; nothing else needs a change.

Each has DEVICE_FILES (paths of which one exists where its driver is installed), find_source() (the name of the way of
reading that is available, or '') and open_reader() (a function that returns the readings, or None).
"""
