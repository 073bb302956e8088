"""Coroutines that sleep and count."""

# expect: slow=yes
import asyncio

total = 0


async def tick(n):
    global total
    for _ in range(14):
        await asyncio.sleep(1)
        total += sum(range(20_000 * n))


async def main():
    await asyncio.gather(*(tick(n) for n in range(1, 5)))


asyncio.run(main())
print(total)
