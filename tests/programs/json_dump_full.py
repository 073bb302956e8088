"""json.dump on a full disk."""

# expect: cause=disk_full exit=1 cwd_on=tmpfs:2M marker=HERE
import json

data = list(range(2_000_000))
with open("m.json", "w") as f:
    json.dump(data, f)  # HERE
