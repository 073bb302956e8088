"""A main task awaits a queue; a heartbeat task only sleeps and loops."""

# expect: slow=yes verdict=STUCK|SUSPECT also=HERE
import asyncio


async def beat():
    while True:
        await asyncio.sleep(0.5)


async def main():
    asyncio.create_task(beat())
    q = asyncio.Queue()
    await q.get()  # HERE


asyncio.run(main())
