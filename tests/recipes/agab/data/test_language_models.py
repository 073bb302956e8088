"""ESM-2 and T5 encoders on tiny random models: what the models' documents ask for, nothing else in the mean."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jackline.errors import JacklineError, UsageError
from jackline.recipes.agab.data import language_models
from jackline.recipes.agab.data.encoders import open_encoder
from jackline.recipes.agab.data.language_models import LanguageModelEncoder, load_model
from jackline.recipes.agab.data.weights import find_weights
from tests.deadline import HANGS_S
from tests.recipes.agab.data.tiny_models import write_esm, write_t5

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="language models need transformers"),
    pytest.mark.xdist_group("transformers"),  # imported by one worker
]
SEQUENCES = [b"EVQLVESGGG|DIQMTQ", b"MKT" * 60, b"A", b"MKTUZOBJX", b"EVQLVESGGG"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {"esm": write_esm(root / "esm"), "t5": write_t5(root / "t5")}


def encoder_of(folder: Path) -> LanguageModelEncoder:
    made = open_encoder(str(folder), "antibody", folder.parent / "cache")
    assert isinstance(made, LanguageModelEncoder)
    return made


@pytest.mark.parametrize("kind", ["esm", "t5"])
def test_a_vector_is_the_same_alone_and_padded_in_a_batch(kind: str, folders: dict[str, Path]) -> None:
    encoder = encoder_of(folders[kind])
    moves: list[int] = []
    together = encoder.encode(SEQUENCES, moves.append)
    alone = np.concatenate([encoder.encode([sequence], moves.append) for sequence in SEQUENCES])
    assert together.shape == (len(SEQUENCES), encoder.dim)
    assert together.dtype == np.float16
    np.testing.assert_allclose(together.astype(float), alone.astype(float), atol=2e-3)
    assert len(np.unique(together, axis=0)) == len(SEQUENCES)
    assert moves[0] == len(SEQUENCES)


def test_the_esm_mean_is_over_residues_of_each_chain_without_begin_and_end(folders: dict[str, Path]) -> None:
    model = load_model(find_weights(str(folders["esm"]), folders["esm"].parent / "memo.json"), "cpu")
    with torch.no_grad():
        states = []
        for chain in ("EVQLVESGGG", "DIQMTQ"):
            ids = torch.tensor([[0, *model.tokenizer.convert_tokens_to_ids(list(chain)), 2]])
            states.append(model.network(input_ids=ids).last_hidden_state[0, 1:-1])
    wanted = torch.cat(states).mean(0).numpy()
    (found,) = encoder_of(folders["esm"]).encode([b"EVQLVESGGG|DIQMTQ"], lambda done: None)
    np.testing.assert_allclose(found.astype(float), wanted, atol=2e-3)


def test_the_t5_text_has_spaces_and_the_separator_and_neither_counts(folders: dict[str, Path]) -> None:
    model = load_model(find_weights(str(folders["t5"]), folders["t5"].parent / "memo.json"), "cpu")
    ids = model.tokenizer("E V Q L V E S G G G </s> D I Q M T Q", return_tensors="pt")["input_ids"]
    words = model.tokenizer.convert_ids_to_tokens(ids[0].tolist())
    assert words == ["▁" + letter for letter in "EVQLVESGGG"] + ["</s>"] + ["▁" + letter for letter in "DIQMTQ"] + [
        "</s>"
    ]
    with torch.no_grad():
        states = model.network(input_ids=ids).last_hidden_state[0]
    wanted = torch.cat([states[:10], states[11:17]]).mean(0).numpy()
    (found,) = encoder_of(folders["t5"]).encode([b"EVQLVESGGG|DIQMTQ"], lambda done: None)
    np.testing.assert_allclose(found.astype(float), wanted, atol=2e-3)


def test_letters_a_model_does_not_know_become_x(folders: dict[str, Path]) -> None:
    t5, esm = encoder_of(folders["t5"]), encoder_of(folders["esm"])
    odd, plain = t5.encode([b"MKTUZOBJX", b"MKTXXXXXX"], lambda done: None)
    assert np.array_equal(odd, plain)
    odd, plain, known = esm.encode([b"MKTJ", b"MKTX", b"MKTU"], lambda done: None)
    assert np.array_equal(odd, plain)
    assert not np.array_equal(known, plain)


@pytest.mark.parametrize("kind", ["esm", "t5"])
def test_frozen_means_evaluation_mode_and_no_gradient(kind: str, folders: dict[str, Path]) -> None:
    """The tiny models have a dropout of one half: two passes in training mode never agree."""
    encoder = encoder_of(folders[kind])
    first, again = (encoder.encode(SEQUENCES, lambda done: None) for _ in range(2))
    assert np.array_equal(first, again)
    network = encoder._model.network  # type: ignore[union-attr]
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())


@pytest.mark.parametrize("kind", ["esm", "t5"])
def test_a_gpu_gives_nearly_the_vectors_of_the_processor(kind: str, folders: dict[str, Path]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    weights = find_weights(str(folders[kind]), folders[kind].parent / "memo.json")
    gpu, processor = LanguageModelEncoder(weights, "cuda"), LanguageModelEncoder(weights, "cpu")
    assert gpu.revision == processor.revision
    found, wanted = (encoder.encode(SEQUENCES, lambda done: None).astype(float) for encoder in (gpu, processor))
    np.testing.assert_allclose(found, wanted, atol=1e-2)
    gpu.release()


@pytest.mark.parametrize("kind", ["esm", "t5"])
def test_a_batch_that_does_not_fit_is_halved_and_one_that_never_fits_is_told(
    kind: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = encoder_of(folders[kind])
    wanted = encoder.encode(SEQUENCES, lambda done: None).astype(float)
    original, sizes = language_models._pool, []

    def small(model: Any, batch: list[Any], name: str) -> Any:
        sizes.append(len(batch))
        if len(batch) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words")
        return original(model, batch, name)

    monkeypatch.setattr(language_models, "_pool", small)
    limit = 2
    found = encoder.encode(SEQUENCES, lambda done: None).astype(float)
    np.testing.assert_allclose(found, wanted, atol=2e-3)
    assert max(sizes) > 2
    limit = 0
    with pytest.raises(JacklineError) as caught:
        encoder.encode(SEQUENCES, lambda done: None)
    assert str(caught.value) == (
        f"error: {kind} does not fit into the memory of cpu: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
        "hint: device=cpu, or a smaller model (esm2-150m, esm2-35m)"
    )


def test_what_is_too_long_is_cut_at_the_end(folders: dict[str, Path]) -> None:
    encoder = encoder_of(folders["t5"])
    long, cut = encoder.encode([b"MKTAY" * 300, (b"MKTAY" * 300)[:1022]], lambda done: None)
    assert np.array_equal(long, cut)
    both, heavy = encoder.encode([b"A" * 1030 + b"|DIQ", b"A" * 1022], lambda done: None)
    assert np.array_equal(both, heavy)


def test_a_tokenizer_that_knows_no_residue_is_an_error_and_not_a_constant_vector(tmp_path: Path) -> None:
    encoder = encoder_of(write_t5(tmp_path / "raw", mark="#"))
    with pytest.raises(JacklineError) as caught:
        encoder.encode([b"EVQLVESGGG"], lambda done: None)
    assert str(caught.value) == (
        "error: 100 % of the residues are unknown to the tokenizer of raw\n"
        "       'E V Q L V E S G G G...' was given to it\n"
        "hint: the tokenizer is not the one the weights were trained with; take both from one place"
    )


def test_a_tokenizer_that_makes_two_tokens_of_a_residue_is_an_error(tmp_path: Path) -> None:
    folder = write_t5(tmp_path / "apart")
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((letter, -1.0) for letter in "▁EVQ")]
    import transformers

    transformers.T5Tokenizer(vocab=vocabulary, extra_ids=0).save_pretrained(folder)
    with pytest.raises(JacklineError, match="the tokenizer of apart made 6 tokens of 3 residues"):
        encoder_of(folder).encode([b"EVQ"], lambda done: None)


def test_a_local_model_is_known_by_its_bytes(folders: dict[str, Path], tmp_path: Path) -> None:
    memo = tmp_path / "memo.json"
    weights = find_weights(str(folders["t5"]), memo)
    assert (weights.kind, weights.width, weights.commit) == ("t5", 16, None)
    assert find_weights(str(folders["t5"]), memo) == weights
    other = write_t5(tmp_path / "t5")
    assert find_weights(str(other), memo).revision == weights.revision
    data = bytearray((other / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (other / "model.safetensors").write_bytes(data)
    assert find_weights(str(other), memo).revision != weights.revision


def test_what_is_no_encoder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        open_encoder("esm3", "antigen", tmp_path)
    assert str(caught.value) == (
        "error: there is no encoder 'esm3'\n"
        "hint: it is embedded, igt5, esm2-8m, esm2-35m, esm2-150m, esm2-650m, esm2-3b, esm2-15b, a model of the hub "
        "(OWNER/NAME) or a local folder"
    )
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UsageError, match=r"its config\.json says model_type=bert"):
        open_encoder(str(tmp_path), "antigen", tmp_path)


def test_without_transformers_the_line_to_type_is_told(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = encoder_of(folders["t5"])
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError) as caught:
        encoder.encode([b"EVQ"], lambda done: None)
    assert str(caught.value) == (
        "error: the encoder t5 needs the package transformers\n"
        "hint: pip install 'jackline[bio]'; the encoder `embedded` needs neither"
    )


@pytest.mark.slow
def test_a_model_of_the_hub_is_taken_from_this_machines_disk_without_a_network(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--Exscientia--IgT5"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(folders["t5"], repository / "snapshots" / commit)
    code = (
        "from pathlib import Path\n"
        "from jackline.recipes.agab.data.encoders import open_encoder\n"
        f"encoder = open_encoder('igt5', 'antibody', Path({str(tmp_path)!r}))\n"
        "print(encoder.name, encoder.revision, encoder.encode([b'EVQ|DIQ'], lambda done: None).shape)\n"
        "try: open_encoder('esm2-8m', 'antigen', None)\n"
        "except Exception as error: print(error)\n"
    )
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS_S, env=environment
    )
    lines = done.stdout.splitlines()
    assert lines[0] == f"Exscientia/IgT5 {commit}-first-1022 (1, 16)", done.stderr
    assert lines[1].startswith("error: cannot get facebook/esm2_t6_8M_UR50D from the hub: ")
    assert lines[2] == (
        "hint: check the name and the network, or give a local folder with its files; `embedded` needs no download"
    )
