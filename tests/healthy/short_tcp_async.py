"""asyncio client opens a short connection each 0.7 s."""

import asyncio


async def handle(r, w):
    await r.read(10)
    w.write(b"pong")
    await w.drain()
    w.close()


async def main():
    srv = await asyncio.start_server(handle, "127.0.0.1", 0)
    host, port = srv.sockets[0].getsockname()
    for _ in range(20):
        r, w = await asyncio.open_connection(host, port)
        w.write(b"ping")
        await r.read()
        w.close()
        await asyncio.sleep(0.7)


asyncio.run(main())
