"""multiprocessing Queue, the worker exits without putting."""

# expect: slow=yes verdict=STUCK|SUSPECT marker=HERE
import multiprocessing as mp


def work(q):
    return


if __name__ == "__main__":
    ctx = mp.get_context("fork")
    q = ctx.Queue()
    p = ctx.Process(target=work, args=(q,))
    p.start()
    print(q.get())  # HERE
