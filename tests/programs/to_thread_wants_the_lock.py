"""A coroutine holds a lock of threads while it awaits a thread that needs it."""
# expect: slow=yes verdict=STUCK label=DEADLOCK also=HERE says="they wait for each other"

import asyncio
import threading

cache_lock = threading.Lock()


def lookup():
    with cache_lock:  # HERE
        return 1


async def main():
    with cache_lock:
        return await asyncio.to_thread(lookup)


asyncio.run(main())
