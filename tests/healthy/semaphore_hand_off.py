"""Two processes hand a turn to each other; a turn takes 3 s."""
# expect: slow=yes

import multiprocessing as mp, time


def player(mine, other, n):
    for _ in range(n):
        mine.acquire()
        time.sleep(3)
        other.release()


if __name__ == "__main__":
    a, b = mp.Semaphore(1), mp.Semaphore(0)
    ps = [mp.Process(target=player, args=x) for x in ((a, b, 7), (b, a, 7))]
    for p in ps:
        p.start()
    for p in ps:
        p.join()
