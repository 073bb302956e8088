"""notify() before wait()."""

# expect: slow=yes verdict=STUCK marker=HERE
import threading

ready = threading.Condition()
with ready:
    ready.notify_all()
with ready:
    ready.wait()  # HERE
