"""A record of a JSON Lines file was cut off when it was written."""
# expect: cause=own_exception exit=1 marker=HERE says="in line 31 of records.jsonl" slow=yes

import json
from pathlib import Path

Path("records.jsonl").write_text('{"text": "whole"}\n' * 30 + '{"text": "cut o\n' + '{"text": "whole"}\n' * 9)
with Path("records.jsonl").open() as records:
    for record in records:
        json.loads(record)  # HERE
