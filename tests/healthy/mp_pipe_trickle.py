"""A child sends a small tuple each second; parent only receives."""

# expect: slow=yes
import multiprocessing as mp, time


def send(c):
    for i in range(14):
        time.sleep(1)
        c.send((i, "ok"))
    c.close()


if __name__ == "__main__":
    a, b = mp.Pipe(duplex=False)
    p = mp.get_context("fork").Process(target=send, args=(b,))
    p.start()
    b.close()
    got = 0
    try:
        while True:
            a.recv()
            got += 1
    except EOFError:
        print("got", got)
