"""A C extension sleeps while it holds the GIL: no other Python thread can run."""
# expect: verdict=STUCK label=STUCK marker=HERE

import ctypes


def call_extension() -> None:
    ctypes.PyDLL(None).sleep(10_000)  # HERE


print("calling the extension", flush=True)
call_extension()
