"""Training code as people write it for a GPU, planned without one: each program here once ended with an error, or was
planned too small."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jackline.errors import JacklineError
from jackline.memory.plan.choose import MOST_MICRO_BATCH, add_evaluation, plan
from jackline.memory.plan.explain import plan_text
from jackline.memory.plan.gpus import GPU_MODELS, find_gpu
from jackline.memory.plan.target import Candidate, load_candidates
from jackline.memory.predict.step import Prediction, predict

L4 = GPU_MODELS["L4"]
HEAD = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n"
WEIGHTS = 1024 * 1024 * 4


def loaded(folder: Path, code: str, *words: str) -> Candidate:
    path = folder / "mine.py"
    path.write_text(HEAD + code)
    (found,) = load_candidates(f"{path}:made", L4, words)
    return found


def predicted(folder: Path, code: str, micro_batch: int = 8) -> Prediction:
    found = loaded(folder, code)
    return predict(found.job, micro_batch, L4)


CHOOSES = """
def made():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Linear(1024, 1024, bias=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    def step(n):
        value = torch.randn(n, 1024).to(device, non_blocking=True)
        model(value).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / 2**30
    return step
"""
HARD = """
def made():
    model = nn.Linear(1024, 1024, bias=False).cuda()
    batch = torch.randn(8, 1024, device="cuda:0")
    assert batch.is_cuda
    return model, (batch,), lambda model, batch: model(batch[0].cuda()).sum()
"""


@pytest.mark.parametrize("code", [CHOOSES, HARD])
def test_the_planned_gpu_is_there_for_a_program_that_asks(tmp_path: Path, code: str) -> None:
    before = torch.cuda.is_available, torch.cuda.synchronize
    found = predicted(tmp_path, code)
    assert found.parts["weights"] == WEIGHTS
    assert found.parts["optimizer"] == pytest.approx(2 * WEIGHTS, rel=0.001)
    assert (torch.cuda.is_available, torch.cuda.synchronize) == before


FINITE = """
def made():
    model = nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    def step(n):
        model(torch.randn(n, 1024)).sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm) or torch.isinf(norm) or norm.isnan():
            return
        optimizer.step()
        optimizer.zero_grad()
    return step
"""


def test_a_step_that_is_left_out_when_gradients_are_infinite_is_planned_with_its_update(tmp_path: Path) -> None:
    assert predicted(tmp_path, FINITE).parts["optimizer"] == pytest.approx(2 * WEIGHTS, rel=0.001)


RECOMPUTED = """
from torch.utils.checkpoint import checkpoint

def made():
    layers = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024))
    scaler, optimizer = torch.amp.GradScaler("cuda"), torch.optim.AdamW(layers.parameters(), fused=True)
    def step(n):
        value = torch.randn(n, 1024, requires_grad=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = checkpoint(layers, value, use_reentrant=REENTRANT).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return step
"""


@pytest.mark.parametrize("how", ["True", "False"])
def test_recomputed_layers_are_computed_under_the_programs_own_autocast_again(tmp_path: Path, how: str) -> None:
    assert predicted(tmp_path, RECOMPUTED.replace("REENTRANT", how)).parts["optimizer"] > 0


RECURRENT = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layers = nn.Linear(64, 64), nn.GRU(64, 64, batch_first=True)

    def forward(self, value):
        return self.layers(self.first(value))[0].sum()

def made():
    return Model(), torch.randn(8, 20, 64)
"""
COMPILED = """
def made():
    model = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.GELU()))
    return model, (torch.randn(8, 64),), lambda model, batch: model(batch[0]).sum()
"""
FLEXIBLE = """
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 192)

    def forward(self, value):
        query, key, value = self.layer(value).view(len(value), -1, 3, 4, 16).permute(2, 0, 3, 1, 4)
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device=value.device)
        return flex_attention(query, key, value, block_mask=mask).sum()

def made():
    return Model(), torch.randn(8, 128, 64)
"""
LAZY = """
def made():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.LazyLinear(10))
    return model, torch.randn(8, 1, 9, 9), lambda model, batch: model(batch).sum()
"""
DISTRIBUTED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, value):
        found = torch.distributions.Normal(self.layer(value), torch.ones(()))
        return found.log_prob(found.rsample()).sum()

def made():
    return Model(), torch.randn(8, 64)
"""
PACKED = """
import random

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layers = nn.Embedding(100, 64), nn.LSTM(64, 64, batch_first=True)

    def forward(self, ids):
        lengths = (ids != 0).sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.layers(packed)[0], batch_first=True)
        return out.sum() if random.random() < 0.5 else out.mean()

def made():
    return Model(), torch.zeros(8, 30, dtype=torch.long)
"""
PADDED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)

    def forward(self, value, is_padding):
        return self.layers(value, src_key_padding_mask=is_padding).sum()

def made():
    return Model(), (torch.randn(8, 30, 64), torch.zeros(8, 30, dtype=torch.bool))
"""
SPREAD = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 4)

    def forward(self, value):
        sizes = (self.layer(value.flatten(0, 1)) > 0).float().sum(0).long().tolist()
        return sum(part.sum() * self.layer.weight.sum() for part in value.flatten(0, 1).split(sizes, dim=0))

def made():
    return Model(), torch.randn(8, 3000, 64)
"""


@pytest.mark.parametrize(
    "code", [RECURRENT, COMPILED, FLEXIBLE, LAZY, DISTRIBUTED, PACKED, PADDED, SPREAD], ids=lambda code: code[:30]
)
def test_a_program_is_planned_that_was_refused(tmp_path: Path, code: str) -> None:
    found = loaded(tmp_path, code)
    made = add_evaluation(found.job, plan(found.job, L4))
    assert (made.fit, made.micro_batch) == ("fits", 8)
    assert made.max_micro_batch > 8
    assert made.evaluation_bytes > 0


def test_a_program_that_decides_by_chance_leaves_pythons_random_numbers_alone(tmp_path: Path) -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    predicted(tmp_path, PACKED)
    assert random.random() == expected


SPARSE = """
def made():
    table = nn.Embedding(10_000, 64, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    def step(n):
        table(torch.randint(0, 10_000, (n, 20))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step
"""


def test_sparse_gradients_are_counted(tmp_path: Path) -> None:
    assert predicted(tmp_path, SPARSE).peak_allocated_bytes > 3 * 10_000 * 64 * 4


GRAPH = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, nodes, edges):
        return torch.zeros_like(nodes).index_add(0, edges[1], self.layer(nodes)[edges[0]]).sum()

def made():
    return Model(), {"nodes": torch.randn(100, 16), "edges": torch.randint(0, 100, (2, 40_000))}
"""
PICTURES = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 8, 3)

    def forward(self, images, targets):
        assert len(images) == len(targets)
        return sum(self.layer(one[None]).sum() * boxes["boxes"].sum() for one, boxes in zip(images, targets))

def made():
    images = [torch.randn(3, 64, 64) for _ in range(4)]
    return Model(), (images, [{"boxes": torch.rand(5, 4)} for _ in images])
"""
OBJECT = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Batch:
    value: torch.Tensor
    name: str = "mine"

def made():
    return nn.Linear(64, 64), Batch(torch.randn(8, 64)), lambda model, batch: model(batch.value).sum()
"""


def test_the_edges_of_a_graph_do_not_grow_with_its_nodes(tmp_path: Path) -> None:
    found = loaded(tmp_path, GRAPH)
    assert found.job.note == "of the batch (2, 40000) keeps its size: only what begins with 100 grows with the batch"
    with torch.device("meta"):
        batch = found.job.batch(7)
    assert (batch["nodes"].shape, batch["edges"].shape) == ((7, 16), (2, 40_000))
    assert predict(found.job, 100, L4).peak_allocated_bytes < 60e6


def test_a_list_with_an_entry_for_each_sample_grows_and_its_entries_do_not(tmp_path: Path) -> None:
    found = loaded(tmp_path, PICTURES)
    assert found.shown["batch_size"] == 4
    with torch.device("meta"):
        images, targets = found.job.batch(6)
    assert [one.shape for one in images] == [(3, 64, 64)] * 6
    assert [one["boxes"].shape for one in targets] == [(5, 4)] * 6
    assert plan(found.job, L4).fit == "fits"


def test_a_batch_may_be_an_object(tmp_path: Path) -> None:
    found = loaded(tmp_path, OBJECT)
    with torch.device("meta"):
        assert found.job.batch(3).value.shape == (3, 64)
    assert plan(found.job, L4).micro_batch == 8


@pytest.mark.parametrize(
    ("code", "message", "hint"),
    [
        (
            "def made():\n    return nn.Linear(3, 3), torch.randn(8, 3)\n",
            "the loss of mine.py:made is a tensor of shape (2, 3), and a step differentiates one number",
            "return (model, batch, loss) with a loss of one number; or let the model return its loss",
        ),
        (
            "def made():\n    open('/nowhere/train.bin')\n",
            "{path}:made cannot be traced without a GPU: FileNotFoundError: [Errno 2] No such file or directory:"
            " '/nowhere/train.bin'",
            "does this code run as it is? Try one step of it",
        ),
        (
            "def made(size):\n    return None\n",
            "{path}:made cannot be traced without a GPU: TypeError: made() missing 1 required positional argument:"
            " 'size'",
            "does this code run as it is? Try one step of it",
        ),
        (
            "def made():\n    return nn.Linear(3, 3), (torch.tensor(1.0),)\n",
            "the batch of {path}:made has no tensor with a first dimension",
            "it returns (model, batch) or (model, batch, loss), or step(n), which does one whole step with n samples",
        ),
        (
            "def made():\n    return nn.Linear(3, 3), torch.randn(8, 4), lambda model, batch: model(batch).sum()\n",
            "mine.py:made cannot be traced without a GPU: a and b must have same reduction dim,"
            " but got [2, 4] X [3, 3].",
            "the rehearsal before step 0 measures it instead; or give shapes that do not depend on values",
        ),
    ],
)
def test_a_mistake_in_a_persons_code_is_told_as_one(tmp_path: Path, code: str, message: str, hint: str) -> None:
    with pytest.raises(JacklineError) as caught:
        plan(loaded(tmp_path, code).job, L4)
    assert caught.value.message == message.format(path=tmp_path / "mine.py")
    assert caught.value.hint == hint


WRITES = """
def made():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    def step(n):
        for one in torch.randn(n, 64):
            loss = model(one).sum()
            loss.backward()
            print(f"loss {loss:.3f} {optimizer.param_groups[0]['lr']:.1e}")
        optimizer.step()
        optimizer.zero_grad()
    return step
"""


def test_a_step_that_takes_its_samples_one_by_one_is_told_how_many_would_fit(tmp_path: Path) -> None:
    """Its traces have no line: each size has events of its own."""
    found = loaded(tmp_path, WRITES)
    made = plan(found.job, L4)
    assert (made.fit, made.micro_batch) == ("fits", 8)
    assert made.max_micro_batch > 8
    text = plan_text(made, found.shown)
    assert "precision of your code" in text
    assert f"({MOST_MICRO_BATCH:,} or more would fit)" in text


NORMED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def forward(self, value):
        if not self.training:
            raise RuntimeError("no evaluation")
        return self.layers(value).sum()

def made():
    return Model(), torch.randn(4, 8)
"""


def test_a_model_that_refuses_one_sample_or_an_evaluation_is_planned_all_the_same(tmp_path: Path) -> None:
    found = loaded(tmp_path, NORMED)
    made = add_evaluation(found.job, plan(found.job, L4))
    assert (made.fit, made.micro_batch, made.evaluation_bytes) == ("fits", 4, 0)
    assert made.notes[-1] == "an evaluation cannot be traced without a GPU: no evaluation"


def test_what_does_not_fit_is_said_in_words(tmp_path: Path) -> None:
    found = loaded(tmp_path, HARD)
    made = plan(found.job, find_gpu("0.01"))
    assert "(not even 1 would fit)" in plan_text(made, found.shown)


def test_an_evaluation_larger_than_the_gpu_is_named(tmp_path: Path) -> None:
    found = loaded(tmp_path, HARD)
    made = replace(plan(found.job, L4), evaluation_bytes=2**40)
    assert (
        "1.0 TiB allocated at the same micro-batch, more than there is: evaluate fewer samples at a time"
        in plan_text(made, found.shown)
    )
