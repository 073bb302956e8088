"""One module for each GPU vendor. Every module in this folder is used; nothing else needs a change to add one.

Each has DEVICE_FILES (paths of which one exists where its driver is installed), find_source() (the name of the
available interface, or '') and open_reader() (a function that returns the readings, or None).
"""
