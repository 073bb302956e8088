"""An event loop that is idle most of the time, with a request every second."""

import asyncio


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while line := await reader.readline():
        await asyncio.sleep(0.5)
        writer.write(line * 200)
        await writer.drain()
    writer.close()


async def main() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    for number in range(14):
        writer.write(b"question %d\n" % number)
        for _ in range(200):
            await reader.readline()
        await asyncio.sleep(0.5)
    writer.close()
    await writer.wait_closed()
    server.close()
    await asyncio.sleep(0.2)  # the server's side of the connection ends too


asyncio.run(main())
print("answered")
