"""Small real programs that are deadlocked, in many spellings, and what must be said about each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """`says` are parts of the sentence, in this order; {HERE} and {THERE} are the marked lines."""

    name: str
    text: str
    says: tuple[str, ...]
    waits: str = "lock"
    has_main: bool = True


_MEET = """
import threading, time
def meet(*locks):
    while not all(lock.locked() for lock in locks): time.sleep(0.01)
"""

CASES = (
    Case(
        "abba_on_one_line",
        _MEET
        + """
a, b = threading.Lock(), threading.Lock()
def other():
    with b:
        meet(a)
        with a: pass  # THERE
threading.Thread(target=other, name="other", daemon=True).start()
with a:
    meet(b)
    with b: pass  # HERE
""",
        ("the main thread holds lock 'a'", "waits for lock 'b' at", ":{HERE}; thread 'other' holds lock 'b'",
         "waits for lock 'a' at", ":{THERE}: they wait for each other"),
    ),
    Case(
        "abba_by_acquire",
        _MEET
        + """
first, second = threading.Lock(), threading.Lock()
def other():
    second.acquire()
    try:
        meet(first)
        first.acquire(True)  # THERE
    finally:
        second.release()
t = threading.Thread(target=other, name="loader"); t.start()
first.acquire()
meet(second)
second.acquire()  # HERE
""",
        ("the main thread holds lock 'first'", "waits for lock 'second'", "thread 'loader' holds lock 'second'",
         "waits for lock 'first'", ":{THERE}: they wait"),
    ),
    Case(
        "ring_of_three_in_a_class",
        """
import threading
class Stage(threading.Thread):
    def __init__(self, name, mine, theirs, gate):
        super().__init__(name=name, daemon=True)
        self.mine, self.theirs, self.gate = mine, theirs, gate
    def run(self):
        with self.mine:
            self.gate.wait()
            for attempt in range(3):
                with self.theirs:
                    print(attempt)
locks = [threading.RLock(), threading.Lock(), threading.RLock()]
gate = threading.Barrier(3)
stages = [Stage(f"stage-{i}", locks[i], locks[(i + 1) % 3], gate) for i in range(3)]
for stage in stages: stage.start()
for stage in stages: stage.join()  # HERE
""",
        ("the main thread waits for the end of thread 'stage-0'", ":{HERE}", "thread 'stage-0' holds lock '",
         "thread 'stage-1' holds lock 'self.mine' ('self.theirs' in thread 'stage-0')",
         "thread 'stage-2' holds", "they wait for each other"),
    ),
    Case(
        "taken_twice_in_two_functions",
        """
import threading
class Cache:
    def __init__(self): self.guard = threading.Lock()
    def get(self):
        with self.guard:
            return self.fill()
    def fill(self):
        with self.guard:  # HERE
            return 1
Cache().get()
""",
        ("the main thread waits for lock 'self.guard' at", ":{HERE}, which it holds already", "waits for itself"),
    ),
    Case(
        "condition_and_lock",
        _MEET
        + """
ready, stats = threading.Condition(), threading.Lock()
inside = threading.Event()
def other():
    with stats:
        inside.wait()
        with ready:  # THERE
            ready.notify()
threading.Thread(target=other, name="notifier", daemon=True).start()
with ready:
    meet(stats)
    inside.set()
    with stats:  # HERE
        ready.wait()
""",
        ("the main thread holds lock 'ready'", "waits for lock 'stats'", "thread 'notifier' holds lock 'stats'",
         "waits for lock 'ready'", "they wait for each other"),
    ),
    Case(
        "full_queue_between_threads",
        """
import queue, threading
requests, answers = queue.Queue(1), queue.Queue(1)
def server():
    while True:
        request = requests.get()
        for _ in range(5): answers.put(request)  # THERE
threading.Thread(target=server, name="server", daemon=True).start()
for number in range(9): requests.put(number)  # HERE
""",
        ("the main thread waits for room in a queue that is full at", ":{HERE}", "thread 'server' waits for room",
         "they wait for each other"),
    ),
    Case(
        "dead_producer",
        """
import queue, threading
batches = queue.Queue()
def produce(): raise SystemExit
threading.Thread(target=produce).start()
batches.get()  # HERE
""",
        ("the main thread waits for an item of a queue that is empty at", ":{HERE}: nobody is left who could end"),
    ),
    Case(
        "pool_waits_for_itself",
        """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)
def inner(): return 1
def outer(): return pool.submit(inner).result()  # THERE
print(pool.submit(outer).result())  # HERE
""",
        ("the main thread waits for the result of a future at", ":{HERE}", "waits for the result of a future at",
         "they wait for each other"),
    ),
    Case(
        "joins_itself_in_a_ring",
        """
import threading
threads = {}
go = threading.Event()
def wait_for(name): go.wait(); threads[name].join()
threads["x"] = threading.Thread(target=wait_for, args=("y",), name="x", daemon=True)
threads["y"] = threading.Thread(target=wait_for, args=("x",), name="y", daemon=True)
for thread in threads.values(): thread.start()
go.set()
threads["x"].join()  # HERE
""",
        ("the main thread waits for the end of thread 'x'", "thread 'x' waits for the end of thread 'y'",
         "thread 'y' waits for the end of thread 'x'", "they wait for each other"),
    ),
    Case(
        "contextmanager_and_a_dictionary",
        """
import contextlib, threading
locks = {"db": threading.Lock(), "cache": threading.Lock()}
gate = threading.Barrier(2)
@contextlib.contextmanager
def locked(name):
    with locks[name]:  # HERE
        yield
def make(first, second):
    def run():
        with locked(first):
            gate.wait()
            with locked(second): print("never")
    return run
threads = [threading.Thread(target=make(*names), name=names[0]) for names in (("db", "cache"), ("cache", "db"))]
for thread in threads: thread.start()
for thread in threads: thread.join()
""",
        ("the main thread waits for the end of thread 'db'", "thread 'db' holds lock 'locks[name]'",
         "waits for lock 'locks[name]' at", ":{HERE}; thread 'cache' holds lock", "they wait for each other"),
    ),
    Case(
        "lock_of_a_guard_object",
        """
import threading
class Guard:
    def __init__(self): self.inner = threading.Lock()
    def __enter__(self): self.inner.acquire(); return self  # HERE
    def __exit__(self, *error): self.inner.release()
a, b, gate = Guard(), Guard(), threading.Barrier(2)
def other():
    with b:
        gate.wait()
        with a: pass
threading.Thread(target=other, name="other", daemon=True).start()
with a:
    gate.wait()
    with b: pass
""",
        ("the main thread holds lock 'a' ('self.inner' in thread 'other')", ":{HERE}; thread 'other' holds lock 'b'",
         "they wait for each other"),
    ),
    Case(
        "taken_in_a_function_that_has_returned",
        """
import threading
lock = threading.Lock()
def take(): lock.acquire()
def other(): take(); stop.wait()
stop = threading.Event()
thread = threading.Thread(target=other, name="other", daemon=True); thread.start()
while not lock.locked(): pass
lock.acquire()  # HERE
""",
        ("the main thread waits for lock 'lock' at", ":{HERE}", "who holds lock 'lock' is not known",
         "every thread that could release it waits too"),
    ),
    Case(
        "a_logger_keeps_talking",
        _MEET
        + """
import sys
a, b = threading.RLock(), threading.Lock()
held = threading.Event()
def other():
    a.acquire(); held.set(); meet(b); b.acquire()  # THERE
def log():
    while True:
        print("gpu 0 %", file=sys.stderr); time.sleep(0.02)
threading.Thread(target=other, name="other", daemon=True).start()
threading.Thread(target=log, name="logger", daemon=True).start()
with b:
    held.wait()
    with a: print("never")  # HERE
""",
        ("the main thread holds lock 'b'", "waits for lock 'a'", "thread 'other' holds lock 'a'", "they wait"),
    ),
    Case(
        "fork_with_a_held_lock",
        """
import multiprocessing, threading
lock, held = threading.Lock(), threading.Event()
def hold():
    with lock:
        held.set()
        threading.Event().wait()  # HOLD
def work():
    with lock: pass  # THERE
threading.Thread(target=hold, name="holder", daemon=True).start()
held.wait()
child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join()  # HERE
""",
        ("waits for the end of process", "waits for lock 'lock' at", ":{THERE}: nobody is left", "was forked from",
         "thread 'holder' was at"),
        waits="child",
    ),
    Case(
        "multiprocessing_locks",
        """
import multiprocessing
context = multiprocessing.get_context("fork")
a, b, gate = context.Lock(), context.RLock(), context.Barrier(2)
def work():
    with b:
        gate.wait()
        with a: pass  # THERE
child = context.Process(target=work, daemon=True); child.start()
with a:
    gate.wait()
    with b: pass  # HERE
""",
        ("the main thread of process", "waits for lock 'b' at", ":{HERE}", "waits for lock 'a' at", ":{THERE}",
         "they wait for each other"),
    ),
    Case(
        "both_pipes_of_a_child_are_full",
        """
import subprocess, sys
echo = "import sys\\nwhile data := sys.stdin.buffer.read(4096): sys.stdout.buffer.write(data); sys.stdout.flush()"
child = subprocess.Popen([sys.executable, "-c", echo], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdin.write(bytes(1_000_000))  # HERE
child.stdin.close()
""",
        ("waits for room in a full pipe (other end: process", ":{HERE}", "waits for room in a full pipe",
         "they wait for each other"),
        waits="pipe",
    ),
    Case(
        "waits_for_a_child_that_cannot_write",
        """
import subprocess
copy = ["dd", "if=/dev/zero", "bs=1M", "count=1", "status=none"]
child = subprocess.Popen(copy, stdout=subprocess.PIPE)
child.wait()  # HERE
""",
        ("waits for the end of process", "(dd)", ":{HERE}", "waits for room in a full pipe", "they wait for each"),
        waits="child",
    ),
    Case(
        "socketpair_both_read",
        """
import os, socket
ours, theirs = socket.socketpair()
if os.fork() == 0:
    ours.close()
    theirs.recv(1)  # THERE
    os._exit(0)
theirs.close()
ours.recv(1)  # HERE
""",
        ("waits for data from a local socket (other end: process", ":{HERE}", "waits for data from a local socket",
         ":{THERE}: they wait for each other"),
        waits="local_socket",
    ),
    Case(
        "flock_abba",
        """
import fcntl, multiprocessing, os
context = multiprocessing.get_context("fork")
gate = context.Barrier(2)
def take(mine, theirs):
    with open(mine, "w") as one, open(theirs, "a") as two:
        fcntl.flock(one, fcntl.LOCK_EX)
        gate.wait()
        fcntl.flock(two, fcntl.LOCK_EX)  # HERE
context.Process(target=take, args=("b.lock", "a.lock"), daemon=True).start()
take("a.lock", "b.lock")
""",
        ("waits for file lock '", "b.lock', held by process", ":{HERE}", "waits for file lock '", "they wait for"),
        waits="file_lock",
    ),
    Case(
        "lockf_abba",
        """
import fcntl, os
one, two = open("one", "w"), open("two", "w")
fcntl.lockf(one, fcntl.LOCK_EX)  # a child does not inherit it
reader, writer = os.pipe()
if (pid := os.fork()) == 0:
    fcntl.lockf(two, fcntl.LOCK_EX)
    os.write(writer, b"x")
    fcntl.lockf(one, fcntl.LOCK_EX)  # THERE
    os._exit(0)
os.read(reader, 1)
os.waitpid(pid, 0)  # HERE
""",
        ("waits for the end of process", ":{HERE}", "waits for file lock '", "one', held by process", ":{THERE}",
         "they wait for each other"),
        waits="child",
    ),
    Case(
        "ring_of_locks_in_a_list",
        """
import threading
locks = [threading.Lock() for _ in range(4)]
gate = threading.Barrier(4)
def stage(number):
    locks[number].acquire()
    gate.wait()
    locks[(number + 1) % 4].acquire()  # THERE
threads = [threading.Thread(target=stage, args=(number,), name=f"stage{number}") for number in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()  # HERE
""",
        ("holds lock 'locks[1]' (since", "waits for lock 'locks[2]' at", ":{THERE}", "they wait for each other"),
    ),
    Case(
        "asyncio_group_waits_for_nobody",
        """
import asyncio
async def consume(ready):
    await ready.wait()  # HERE
async def main():
    ready = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(consume(ready), name="consumer")
asyncio.run(main())
""",
        ("waits for task 'consumer' of its event loop, which awaits a signal (Event or Condition) at", ":{HERE}"),
        waits="local_socket",
    ),
    Case(
        "asyncio_waits_for_nobody",
        """
import asyncio
async def train():
    await asyncio.Event().wait()  # HERE
asyncio.run(train())
""",
        ("the main thread waits for task 'Task-1' of its event loop, which awaits a signal (Event or Condition) at",
         ":{HERE}: nobody is"),
        waits="local_socket",
    ),
    Case(
        "too_few_threads_for_a_barrier",
        """
import threading
from concurrent.futures import ThreadPoolExecutor
barrier = threading.Barrier(3)
def step(number):
    barrier.wait()  # THERE
with ThreadPoolExecutor(2) as pool:
    futures = [pool.submit(step, number) for number in range(3)]
    print([future.result() for future in futures])  # HERE
""",
        ("the main thread waits for the result of a future", ":{HERE}; thread '", "-0_0' (1 other does the same)",
         "(Barrier)", ":{THERE}: no thread that is left could end these waits"),
    ),
    Case(
        "semaphore_lost_by_an_error",
        """
import threading
threading.excepthook = lambda hook: None
slots = threading.BoundedSemaphore(2)
def job(number):
    slots.acquire()  # THERE
    if number < 2: raise RuntimeError(number)
    slots.release()
jobs = [threading.Thread(target=job, args=(number,), name=f"job-{number}") for number in range(5)]
for one in jobs: one.start()
for one in jobs: one.join()  # HERE
""",
        ("the main thread waits for the end of thread 'job-2'", ":{HERE}", "thread 'job-2' (2 others do the same)",
         "(BoundedSemaphore)", ":{THERE}: no thread that is left could end these waits"),
    ),
    Case(
        "a_pool_fed_by_a_generator_that_waits",
        """
import multiprocessing, queue
rows = queue.Queue()
for number in range(3): rows.put(number)
def feed():
    while True: yield rows.get()  # THERE
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for result in pool.imap(abs, feed()): pass  # HERE
""",
        ("waits for the results of a pool at", ":{HERE}", "(_handle_tasks)", "an item of a queue that is empty",
         ":{THERE}: no thread that is left could end"),
    ),
    Case(
        "imports_itself_in_a_thread",
        """
import os, sys
os.makedirs("inner", exist_ok=True)
with open("inner/plugin.py", "w") as file:
    file.write("import threading\\ndef load(): import inner.plugin as me; me.VALUE\\n"
               "thread = threading.Thread(target=load, name='loader'); thread.start(); thread.join(); VALUE = 3")
sys.path.insert(0, os.getcwd())
import inner.plugin
""",
        ("the main thread holds the import of module 'inner.plugin' and waits for the end of thread 'loader'",
         "thread 'loader' waits for the import of module 'inner.plugin' at", "plugin.py:2: they wait for each other"),
    ),
    Case(
        "processes_with_the_same_names_for_two_locks",
        """
import multiprocessing, time
context = multiprocessing.get_context("fork")
def work(first, second, mine, theirs):
    with first:
        mine.set(); theirs.wait()
        with second:  # THERE
            pass
if __name__ == "__main__":
    a, b, x, y = context.Lock(), context.Lock(), context.Event(), context.Event()
    both = [context.Process(target=work, args=args) for args in ((a, b, x, y), (b, a, y, x))]
    for one in both: one.start()
    for one in both: one.join()  # HERE
""",
        ("waits for the end of process", ":{HERE}", "holds lock 'first' ('second' in the main thread of process",
         "(since", ":5) and waits for lock 'second' at", ":{THERE}",
         "holds lock 'first' ('second' in the main thread", "they wait for each other"),
        waits="child",
    ),
    Case(
        "an_owner_that_has_ended",
        """
import threading
class Table:
    def __init__(self):
        self.guard = threading.RLock()
    def fill(self):
        self.guard.acquire()
table = Table()
filler = threading.Thread(target=table.fill, name="filler")
filler.start(); filler.join()
with table.guard: pass  # HERE
""",
        ("the main thread waits for lock 'table.guard'", ":{HERE}: nobody is left who could end this wait",
         "the thread 'filler' that took lock 'table.guard' has ended without giving it back"),
    ),
    Case(
        "tasks_of_a_pool_that_wait_for_tasks_of_it",
        """
from concurrent.futures import ThreadPoolExecutor, wait
pool = ThreadPoolExecutor(3)
def inner(number): return number
def outer(number):
    parts = [pool.submit(inner, number) for _ in range(2)]
    wait(parts)  # THERE
    return sum(part.result() for part in parts)
print(list(pool.map(outer, range(6))))  # HERE
""",
        ("the main thread waits for the result of a future", ":{HERE}; thread '", "(2 others do the same) waits for",
         ":{THERE}", "all 3 threads of that pool wait for results, while", "tasks wait in its queue for a free one"),
    ),
    Case(
        "a_child_that_left_early_and_whose_end_is_still_open_here",
        """
import multiprocessing, time
def simulate(connection):
    connection.send(1)
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=simulate, args=(theirs,)); child.start()
    print(ours.recv())
    print(ours.recv())  # HERE
""",
        ("the main thread waits for data from a local socket", ":{HERE}: nobody is left who could end this wait",
         "its child, has exited with code 0"),
        waits="local_socket",
    ),
    Case(
        "a_child_that_was_killed",
        """
import multiprocessing, os, signal
def produce(queue):
    queue.put(1)
    queue.close(); queue.join_thread()
    os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    items = context.Queue()
    child = context.Process(target=produce, args=(items,)); child.start()
    while True:
        items.get()  # HERE
""",
        ("the main thread waits for data from a pipe", ":{HERE}: nobody is left who could end this wait; process ",
         ", its child, was killed by SIGKILL"),
        waits="pipe",
    ),
)  # fmt: skip

# Programs that look nearly the same and will continue: (name, what the main thread waits for, text).
ALIVE = (
    ("the holder of the lock sleeps", "lock", _MEET + """
lock = threading.Lock()
def hold():
    with lock: time.sleep(600)
threading.Thread(target=hold, daemon=True).start()
meet(lock)
with lock: pass
"""),
    ("one of the two gives up after a while", "lock", _MEET + """
a, b = threading.Lock(), threading.Lock()
def other():
    with b:
        meet(a)
        a.acquire(timeout=600)
threading.Thread(target=other, daemon=True).start()
with a:
    meet(b)
    b.acquire()
"""),
    ("a producer sleeps", "lock", """
import queue, threading, time
items = queue.Queue()
def produce(): time.sleep(600); items.put(1)
threading.Thread(target=produce, daemon=True).start()
items.get()
"""),
    ("a worker of the pool reads from the network", "lock", """
import socket
from concurrent.futures import ThreadPoolExecutor
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
ThreadPoolExecutor(2).submit(client.recv, 1).result()
"""),
    ("a worker computes in C while two others wait for each other", "sleep", _MEET + """
a, b = threading.Lock(), threading.Lock()
def other():
    with b: meet(a); a.acquire(timeout=500)
threading.Thread(target=other, daemon=True).start()
with a: meet(b); time.sleep(600)
"""),
    ("a child sleeps before it writes", "pipe", """
import subprocess
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.PIPE)
child.stdout.read()
"""),
    ("a child of the child may still write", "child", """
import subprocess
subprocess.run(["sh", "-c", "sleep 600 | cat"])
"""),
    ("the holder of the file lock sleeps", "file_lock", """
import fcntl, os, time
file = open("lock", "w")
ready, tell = os.pipe()
if os.fork() == 0:
    own = open("lock", "w"); fcntl.flock(own, fcntl.LOCK_EX); os.write(tell, b"x"); time.sleep(600)
os.read(ready, 1)
fcntl.flock(file, fcntl.LOCK_EX)
"""),
    ("an event loop with a timer", "local_socket", """
import asyncio
async def main(): await asyncio.wait_for(asyncio.Event().wait(), 600)
asyncio.run(main())
"""),
    ("an event loop and a thread that will call it", "local_socket", """
import asyncio, time
async def main(): await asyncio.to_thread(time.sleep, 600)
asyncio.run(main())
"""),
)  # fmt: skip
