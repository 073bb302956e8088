"""Tiny protein language models with random weights, on disk as the real ones are: no download."""

from __future__ import annotations

from pathlib import Path

import torch

ESM_VOCABULARY = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>"]
T5_RESIDUES = "ALGVSREDTIPKFQNYMHWCX"


def write_esm(folder: Path) -> Path:
    import transformers

    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(ESM_VOCABULARY))
    transformers.EsmTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.EsmConfig(
        vocab_size=len(ESM_VOCABULARY),
        mask_token_id=32,
        pad_token_id=1,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        position_embedding_type="rotary",
        token_dropout=True,
        emb_layer_norm_before=False,
        hidden_dropout_prob=0.5,
        max_position_embeddings=1026,
    )
    torch.manual_seed(1)
    transformers.EsmModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


def write_t5(folder: Path, *, residues: str = T5_RESIDUES, mark: str = "▁") -> Path:
    """`mark` is what a space becomes in the vocabulary; another one makes a vocabulary that knows no residue."""
    import transformers

    folder.mkdir(parents=True)
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocabulary += [(f"{mark}{letter}", -2.0) for letter in residues]
    tokenizer = transformers.T5Tokenizer(vocab=vocabulary, extra_ids=0)
    tokenizer.save_pretrained(folder)
    config = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.5
    )
    torch.manual_seed(2)
    transformers.T5EncoderModel(config).save_pretrained(folder)
    return folder
