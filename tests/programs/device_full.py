"""Disk full without a disk of our own to fill: /dev/full says the same words."""
# expect: cause=disk_full exit=1 marker=HERE

with open("/dev/full", "wb", buffering=0) as file:
    file.write(b"checkpoint")  # HERE
