"""As library_recursion, in multiprocessing's pickling of what a worker gets."""
# expect: slow=yes cause=own_exception exit=1 marker=HERE says=RecursionError

import json

nested = []
for _ in range(100_000):
    nested = [nested]
text = json.dumps(nested, indent=1)  # HERE
