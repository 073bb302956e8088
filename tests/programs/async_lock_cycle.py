"""Two coroutines, two asyncio locks, opposite order."""

# expect: slow=yes verdict=STUCK also=HERE
import asyncio


async def go(first, second):
    async with first:
        await asyncio.sleep(0.1)
        async with second:  # HERE
            pass


async def main():
    a, b = asyncio.Lock(), asyncio.Lock()
    await asyncio.gather(go(a, b), go(b, a))


asyncio.run(main())
