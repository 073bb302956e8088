"""Three workers wait for each other in a ring; the main thread looks after them every second and prints."""
# expect: verdict=STUCK label=DEADLOCK says='they wait for each other'

import threading
import time


class Philosopher(threading.Thread):
    def __init__(self, number: int, left: threading.Lock, right: threading.Lock) -> None:
        super().__init__(name=f"philosopher-{number}", daemon=True)
        self.left, self.right = left, right

    def run(self) -> None:
        with self.left:
            gate.wait()
            with self.right:
                print("eats")


forks = [threading.Lock() for _ in range(3)]
gate = threading.Barrier(3)
people = [Philosopher(number, forks[number], forks[(number + 1) % 3]) for number in range(3)]
for person in people:
    person.start()
while any(person.is_alive() for person in people):
    print("still waiting for the workers", flush=True)
    for person in people:
        person.join(0.4)
