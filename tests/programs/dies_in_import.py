"""A package that is not installed."""
# expect: cause=import_error exit=1 marker=HERE says=flash_attention_nine

import json

import flash_attention_nine  # HERE

print(json)
