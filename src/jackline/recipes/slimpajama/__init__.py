"""SlimPajama: a GPT trained on a stream of jsonl.zst, chunk by chunk."""
