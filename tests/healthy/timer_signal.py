"""Work in a signal handler, main pauses."""

# expect: slow=yes
import signal

n = 0


def on(*_):
    global n
    n += 1
    sum(range(200_000))


signal.signal(signal.SIGALRM, on)
signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
while n < 28:
    signal.pause()
