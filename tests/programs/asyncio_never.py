"""A coroutine awaits a future that nobody will ever resolve."""
# expect: verdict=STUCK marker=HERE

import asyncio


async def train() -> None:
    print("waiting for the batch")
    await asyncio.get_running_loop().create_future()  # HERE


asyncio.run(train())
