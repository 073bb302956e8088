"""Several tasks of an event loop wait for a queue that nobody fills, below a gather."""
# expect: verdict=STUCK marker=HERE says="task 'fetch-"

import asyncio


async def fetch(batches: asyncio.Queue) -> None:
    await batches.get()  # HERE


async def train() -> None:
    print("waiting for batches")
    batches: asyncio.Queue = asyncio.Queue()
    await asyncio.gather(*(asyncio.create_task(fetch(batches), name=f"fetch-{n}") for n in range(3)))


asyncio.run(train())
