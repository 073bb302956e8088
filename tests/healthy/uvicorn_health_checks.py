"""A web server that is asked for its health every 4 s."""
# expect: slow=yes needs=uvicorn

import asyncio, threading, time, urllib.request
import uvicorn


async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))


def ask():
    while not server.started:
        time.sleep(0.1)
    port = server.servers[0].sockets[0].getsockname()[1]
    for _ in range(10):
        time.sleep(4)
        urllib.request.urlopen(f"http://127.0.0.1:{port}/").read()
    server.should_exit = True


threading.Thread(target=ask).start()
server.run()
