"""Workers fill a managed dict slowly."""

# expect: slow=yes
import multiprocessing as mp, time


def fill(d, k):
    for i in range(9):
        time.sleep(1.5)
        d[k, i] = i


if __name__ == "__main__":
    ctx = mp.get_context("fork")
    with ctx.Manager() as m:
        d = m.dict()
        ps = [ctx.Process(target=fill, args=(d, k)) for k in range(2)]
        [p.start() for p in ps]
        [p.join() for p in ps]
        print(len(d))
