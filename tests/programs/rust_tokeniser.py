"""One long call into Rust that has released the GIL and shows no Python frame of its own."""
# expect: verdict=BUSY|PROGRESS never=STUCK,SUSPECT marker=HERE needs=tokenizers

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import Tokenizer, models, normalizers

# All the work is in normalising, so that the results stay small while the call lasts a minute.
tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
tokenizer.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()] * 8)
documents = ["The Quick Brown Fox Jumps Over the Lazy Dog " * 100] * 40_000


def encode() -> None:
    tokenizer.encode_batch(documents)  # HERE


print("tokenising", len(documents), "documents")
encode()
