"""asyncio waits for a thread of its executor, and that thread for a lock that nobody lets go."""
# expect: verdict=STUCK marker=HERE also=THERE

import asyncio
import threading

lock = threading.Lock()
lock.acquire()


def read_batch() -> None:
    lock.acquire()  # THERE


async def main() -> None:
    await asyncio.get_running_loop().run_in_executor(None, read_batch)  # HERE


print("training")
asyncio.run(main())
