"""Never out of memory: predict before the run, rehearse before step 0, guard and shrink during it, explain after.

`cards`, `allocator`, `formula`, `host_guard` and `own_file` need no torch; the rest does and runs in a child process
of the command line.
"""
