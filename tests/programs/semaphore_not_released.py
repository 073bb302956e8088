"""Two permits, three takers, nobody gives back."""

# expect: slow=yes verdict=STUCK marker=HERE
import threading

permits = threading.Semaphore(2)


def load():
    permits.acquire()


for _ in range(2):
    t = threading.Thread(target=load)
    t.start()
    t.join()
permits.acquire()  # HERE
