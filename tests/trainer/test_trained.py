"""The model in hand: loaded from a run, sampled from, exported; the same numbers everywhere."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import jackline
from jackline.data.tokenise.tokenizer import load_tokenizer
from jackline.errors import JacklineError, UsageError
from jackline.models.gpt import GPT
from jackline.models.nsa.model import NSAModel
from jackline.models.nsa.shape import NSAShape
from jackline.models.shapes import GPTShape
from jackline.rundir.layout import RunDir
from jackline.trainer.config import resolve
from jackline.trainer.trained.evaluate import evaluate_run
from jackline.trainer.trained.hf import check_gguf, export_hf, export_onnx, tokenizer_json
from jackline.trainer.trained.load import Trained
from jackline.trainer.trained.sample import Sampling, apply_linear, choose, sample
from tests.session.nursery import EVERY_SAVE, Nursery

pytestmark = pytest.mark.xdist_group("transformers")  # one training, and transformers is imported by one worker
SCRIPT = Path(__file__).with_name("training.py")
SHAPE = GPTShape(3, 4, 32, context=48, vocab_size=320)


def make_model(shape: GPTShape = SHAPE) -> GPT:
    torch.manual_seed(5)
    model = GPT(shape)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)  # also biases and norms, so that a forgotten one is seen
    return model.eval()


def in_hand(model: GPT | NSAModel) -> Trained:
    return Trained(
        model, resolve("demo").config, load_tokenizer("bytes"), 7, Path("runs/x/checkpoints/step-00000007")
    )


@pytest.fixture(scope="module")
def run(nursery: Nursery, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    folder = tmp_path_factory.mktemp("trained")
    ended = nursery.start(SCRIPT, [str(folder / "runs" / "small"), str(corpus)], folder, EVERY_SAVE).wait()
    assert ended.code == 0, ended.output
    return RunDir(folder / "runs" / "small")


@pytest.mark.parametrize("outputs", [1, 2, 7, 64, 1001])
@pytest.mark.parametrize("bias", [True, False])
def test_one_token_is_multiplied_in_parts_as_a_whole(outputs: int, bias: bool) -> None:
    layer = torch.nn.Linear(48, outputs, bias=bias)
    for inputs in (torch.randn(1, 1, 48), torch.randn(1, 48), torch.randn(1, 5, 48)):
        torch.testing.assert_close(apply_linear(layer, inputs), layer(inputs))


def test_a_finished_recipe_is_loaded_with_its_tokenizer_and_sampled(run: RunDir) -> None:
    trained = jackline.load(run.path, "latest")
    assert trained.step == 12
    assert not trained.model.training
    text = "the quick fox"
    assert trained.decode(trained.encode(text)) == text
    logits = trained.model(trained.encode(text))
    assert logits.shape[:2] == (1, len(text))
    one = trained.complete(text, num_tokens=20, seed=3)
    assert one == trained.complete(text, num_tokens=20, seed=3)
    assert jackline.load(run.checkpoints / "step-00000012").step == 12
    with pytest.raises(UsageError, match="has no checkpoint '5000'"):
        jackline.load(run.path, 5000)


def test_a_run_is_evaluated_on_a_text_of_its_own(run: RunDir, tmp_path: Path) -> None:
    text = tmp_path / "new.txt"
    text.write_text("the quick brown fox " * 40)
    trained = jackline.load(run.path, "latest")
    found = evaluate_run(trained, str(text), 3)
    ids = torch.tensor(list(text.read_bytes()) + [256])
    windows = ids[: 16 * ((len(ids) - 1) // 16) + 1].unfold(0, 17, 16)
    with torch.inference_mode():
        assert found.loss == pytest.approx(
            float(trained.model(windows[:, :-1], windows[:, 1:])) / (16 * len(windows))
        )
    assert found.to_json()["tokens"] == 16 * len(windows) == 16 * found.num_samples
    assert found.to_json()["perplexity"] == pytest.approx(math.exp(found.loss))
    assert evaluate_run(trained, "", 3).num_tokens > 0, "what the run is validated on"
    for name, words in {
        "empty.txt": "it is empty",
        "nowhere/*.txt": "nowhere",
        "short.txt": "shorter than one window",
    }.items():
        if "/" not in name:
            (tmp_path / name).write_text("" if name.startswith("empty") else "few")
        with pytest.raises(UsageError, match=words):
            evaluate_run(trained, str(tmp_path / name), 3)


def test_a_damaged_checkpoint_is_refused_with_its_name(run: RunDir, tmp_path: Path) -> None:
    copy = RunDir(tmp_path / "runs" / "small")
    shutil.copytree(run.path, copy.path)
    newest = max(copy.checkpoints.glob("step-*"))
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    with pytest.raises(JacklineError, match=f"{newest.name} is not whole"):
        jackline.load(copy.path, "latest")


def test_a_run_that_is_no_recipes_is_explained(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "own"
    shutil.copytree(Path(__file__).parents[1] / "golden" / "format1-finished", folder)
    (folder / "checkpoints" / "step-00000003").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"it has no config\.yaml"):
        jackline.load(folder)


def test_kept_keys_and_values_give_what_the_whole_text_gives() -> None:
    model = make_model()
    start = torch.arange(10)[None] * 7 % 257
    made = list(sample(model, start, Sampling(30, temperature=0), vocab_size=320, eos_id=None))
    ids = start
    for token in made:
        with torch.inference_mode():
            assert int(model(ids)[0, -1].argmax()) == token
        ids = torch.cat((ids, torch.tensor([[token]])), dim=1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the recorded step needs one")
def test_on_a_gpu_the_recorded_step_gives_what_the_cpu_gives() -> None:
    start = torch.arange(10)[None] * 7 % 257
    model = make_model()
    here = list(sample(model, start, Sampling(60, temperature=0), vocab_size=320, eos_id=None))
    model.to("cuda")
    assert list(sample(model, start.cuda(), Sampling(60, temperature=0), vocab_size=320, eos_id=None)) == here


def test_a_text_longer_than_the_context_continues_with_its_newer_half() -> None:
    made = list(
        sample(make_model(), torch.zeros(1, 40, dtype=torch.long), Sampling(60, seed=1), vocab_size=320, eos_id=None)
    )
    assert len(made) == 60
    long = torch.zeros(1, 200, dtype=torch.long)
    assert len(list(sample(make_model(), long, Sampling(3, seed=1), vocab_size=320, eos_id=None))) == 3


def test_choices_are_what_they_say() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    drawn = {choose(logits, Sampling(temperature=1.0, top_p=0.79), generator) for _ in range(200)}
    assert drawn == {0, 1}
    assert {choose(logits, Sampling(temperature=1.0, top_p=1.0, top_k=1), generator) for _ in range(50)} == {0}
    assert choose(logits, Sampling(temperature=0), generator) == 0
    assert {choose(logits, Sampling(temperature=1.0, top_p=0.01), generator) for _ in range(50)} == {0}
    for wrong in ({"num_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}):
        with pytest.raises(UsageError):
            Sampling(**wrong)  # type: ignore[arg-type]


def test_the_end_of_a_document_ends_the_text_and_no_character_is_cut_in_two() -> None:
    trained = in_hand(make_model())
    pieces = list(trained.stream("héllo", Sampling(60, temperature=3.0, seed=2)))
    assert all(not piece.endswith("\ufffd") for piece in pieces[:-1])
    assert 256 not in list(
        sample(trained.model, trained.encode("x"), Sampling(200, temperature=5.0, seed=1), vocab_size=257, eos_id=256)
    )


@pytest.mark.parametrize(
    "shape", [SHAPE, replace(SHAPE, is_tied=False), replace(SHAPE, activation="relu", num_layers=1)], ids=str
)
def test_transformers_loads_the_export_and_gives_the_same_logits(shape: GPTShape, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = make_model(shape)
    export_hf(in_hand(model), tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    ids = torch.randint(0, 257, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert (theirs(ids).logits - model(ids)).abs().max() <= 1e-5 * max(1.0, float(model(ids).abs().max()))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "def main():\n\treturn 'naïve — 猫'  "
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == 256


NSA = NSAShape(
    num_layers=2, width=32, num_heads=4, num_groups=2, head_width=8, vocab_size=320, compressed_length=8,
    compressed_stride=4, block_length=8, num_blocks=3, num_local=1, window=12,
)  # fmt: skip


@pytest.mark.parametrize("kind", ["head with a bias", "sparse attention", "dense attention of that model"])
def test_a_model_that_transformers_has_no_class_for_is_exported_with_its_code(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if "attention" in kind:
        torch.manual_seed(5)
        model = NSAModel(replace(NSA, is_dense=kind.startswith("dense"))).eval()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    else:
        model = make_model(replace(SHAPE, is_tied=False, has_head_bias=True, activation="relu"))
    files = export_hf(in_hand(model), tmp_path / "hf")
    assert [path.suffix for path in files if path.suffix not in (".json", ".safetensors")] == [".py"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True).eval()
    ids = torch.randint(0, 257, (2, 45), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        ours = model(ids)
        assert (theirs(ids).logits - ours).abs().max() <= 1e-5 * max(1.0, float(ours.abs().max()))
        made = theirs.generate(ids[:1, :20], max_new_tokens=5, do_sample=False, pad_token_id=256, eos_token_id=319)
    here = list(sample(model, ids[:1, :20], Sampling(5, temperature=0), vocab_size=320, eos_id=None))
    assert made[0, 20:].tolist() == here


def test_onnx_gives_the_same_logits_for_any_batch_and_length(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    model = make_model(replace(SHAPE, num_layers=1))
    model.separator = 256
    files = export_onnx(in_hand(model), tmp_path / "onnx")
    assert [path.name for path in files] == ["model.onnx", "tokenizer.json"]
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx")
    for size in ((1, 1), (3, 48)):
        ids = torch.randint(0, 257, size)
        (made,) = session.run(None, {"input_ids": ids.numpy()})
        with torch.inference_mode():
            ours = model(ids)
        assert (torch.from_numpy(made) - ours).abs().max() <= 1e-5 * max(1.0, float(ours.abs().max()))


def test_what_llama_cpp_and_onnx_have_no_place_for_is_refused(tmp_path: Path) -> None:
    def refusal(model: GPT | NSAModel) -> str:
        with pytest.raises(UsageError) as caught:
            check_gguf(in_hand(model))
        return caught.value.message

    assert refusal(make_model()) == "llama.cpp has no tokenizer of plain bytes"
    assert "computes with gelu, and this model with relu" in refusal(make_model(replace(SHAPE, activation="relu")))
    assert "no bias in its head" in refusal(make_model(replace(SHAPE, has_head_bias=True, is_tied=False)))
    assert "not of the shape of GPT-2" in refusal(NSAModel(NSA))
    with pytest.raises(UsageError, match="only models of the shape of GPT-2"):
        export_onnx(in_hand(NSAModel(NSA)), tmp_path)
    words = load_tokenizer("gpt2")
    check_gguf(replace(in_hand(make_model(replace(SHAPE, vocab_size=50304))), tokenizer=words))


def test_the_byte_tokenizer_has_one_entry_for_each_byte() -> None:
    made = json.loads(tokenizer_json(load_tokenizer("bytes")))
    assert sorted(made["model"]["vocab"].values()) == list(range(257))
