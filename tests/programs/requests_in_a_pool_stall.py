"""A pool of threads downloads; the server accepts and says nothing."""
# expect: verdict=STUCK label=STUCK_NET marker=HERE says='waiting for the network (127.0.0.1:'

import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor

server = socket.create_server(("127.0.0.1", 0))
url = f"http://127.0.0.1:{server.getsockname()[1]}/shard"


def download(number: int) -> bytes:
    return urllib.request.urlopen(f"{url}-{number}").read()


with ThreadPoolExecutor(3) as pool:
    print("downloading")
    shards = list(pool.map(download, range(6)))  # HERE
