"""A checkpoint that does not fit on the disk."""
# expect: cause=disk_full exit=1 marker=HERE cwd_on=tmpfs:4M


def save() -> None:
    with open("checkpoint.bin", "wb") as file:
        for _ in range(64):
            file.write(b"x" * (1 << 20))  # HERE


save()
