"""What /proc, cgroups, NVML, disks and limits say, as plain numbers.

Owns every reading of the machine. Knows nothing about runs, verdicts or wording. Nothing here raises for a process
that has exited or a file that the kernel does not have: the reading is None or absent.
"""
