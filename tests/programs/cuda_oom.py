"""The error of a full GPU, word for word, from a machine that has none."""
# expect: cause=cuda_oom exit=1 marker=HERE says="needed 2.0 GiB"


class OutOfMemoryError(RuntimeError):
    pass


OutOfMemoryError.__module__ = "torch"


def forward() -> None:
    raise OutOfMemoryError(  # HERE
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of which 612.81 MiB "
        "is free. Including non-PyTorch memory, this process has 23.03 GiB memory in use. Of the allocated memory "
        "21.97 GiB is allocated by PyTorch, and 617.19 MiB is reserved by PyTorch but unallocated."
    )


forward()
