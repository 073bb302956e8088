"""Waits for signals that come every 3 s."""
# expect: slow=yes

import os, signal, threading, time

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
pid = os.getpid()
n = 0
if os.fork() == 0:
    for _ in range(13):
        time.sleep(3)
        os.kill(pid, signal.SIGUSR1)
    os._exit(0)
while n < 13:
    signal.sigwait({signal.SIGUSR1})
    n += 1
