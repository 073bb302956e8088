"""What /proc, cgroups, NVML, disks and limits say, as plain numbers.

Owns every reading of the machine. Knows nothing of runs, verdicts or wording. Nothing here raises for a process
that is gone or a file the kernel does not have: the reading is None or absent.
"""
