"""A generator was left in the middle of its `with`; the next one wants the same lock, in the same thread."""
# expect: slow=yes verdict=STUCK marker=HERE says="nobody is left who could end this wait"

import threading

lock = threading.Lock()


def records(items):
    for item in items:
        with lock:  # HERE
            yield item


train, valid = records(range(10)), records(range(10))
print("first", next(train))
print("second", next(valid))
