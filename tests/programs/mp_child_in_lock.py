"""Parent joins a child that waits for a lock it holds twice."""

# expect: slow=yes verdict=STUCK|SUSPECT marker=HERE also=THERE
import multiprocessing as mp, threading


def work():
    l = threading.Lock()
    l.acquire()
    l.acquire()  # THERE


if __name__ == "__main__":
    p = mp.get_context("fork").Process(target=work)
    p.start()
    p.join()  # HERE
