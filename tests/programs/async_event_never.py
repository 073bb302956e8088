"""Tasks wait on an asyncio.Event."""

# expect: verdict=STUCK marker=HERE
import asyncio


async def consumer(ev):
    await ev.wait()  # HERE


async def main():
    ev = asyncio.Event()
    async with asyncio.TaskGroup() as tg:
        tg.create_task(consumer(ev), name="consumer")


asyncio.run(main())
