"""The script is done, but a thread that is no daemon keeps the interpreter from ending."""
# expect: verdict=STUCK label=DEADLOCK also=THERE out=done

import threading


def upload() -> None:
    threading.Event().wait()  # THERE


threading.Thread(target=upload, name="uploader").start()
print("done")
