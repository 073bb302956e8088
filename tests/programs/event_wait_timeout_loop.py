"""Event.wait(0.1) in a loop; the setter died."""

# expect: slow=yes verdict=STUCK|SUSPECT marker=HERE
import threading

done = threading.Event()


def setter():
    raise RuntimeError("boom")


threading.Thread(target=setter).start()
while not done.wait(0.1):  # HERE
    pass
