"""asyncio streams: the peer accepts and says nothing."""

# expect: slow=yes verdict=STUCK label=STUCK_NET says=network
import asyncio, os, socket

srv = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    c, _ = srv.accept()
    c.recv(1 << 20)
    c.recv(1 << 20)
    os._exit(0)


async def main():
    r, w = await asyncio.open_connection(*srv.getsockname())
    w.write(b"GET / HTTP/1.0\r\n\r\n")
    await r.read()  # HERE


asyncio.run(main())
