"""A producer puts an item every two seconds; the consumer does nothing else."""
# expect: slow=yes

import asyncio


async def main():
    queue = asyncio.Queue()

    async def produce():
        for number in range(10):
            await asyncio.sleep(2)
            await queue.put(number)
        await queue.put(None)

    task = asyncio.create_task(produce())
    while await queue.get() is not None:
        pass
    await task


asyncio.run(main())
