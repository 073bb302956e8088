"""The whole evaluation is one call into C that lasts longer than every threshold."""

import hashlib
import time


def evaluate(rounds: int) -> None:
    hashlib.pbkdf2_hmac("sha256", b"prediction", b"label", rounds)


start = time.process_time()
evaluate(200_000)
rounds_per_s = 200_000 / (time.process_time() - start)
print("evaluating", flush=True)
evaluate(int(rounds_per_s * 13))
print("evaluated")
