"""The mistake is the script's, the exception comes from deep in a library."""
# expect: cause=own_exception exit=1 marker=HERE says=JSONDecodeError

import json


def read_settings() -> dict:
    return json.loads('{"learning_rate": 3e-4,}')  # HERE


print("reading settings")
read_settings()
