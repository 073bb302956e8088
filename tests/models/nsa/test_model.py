"""The sparse language model on the plain road: nothing leaks back, and sparse becomes full where it should."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from jackline.models.loss import IGNORED
from jackline.models.nsa import reference
from jackline.models.nsa.attention import SparseAttention, rotary_turns, rotate
from jackline.models.nsa.model import NSAModel
from jackline.models.nsa.shape import NSA_SHAPES, NSAShape, count_parameters

SMALL = NSAShape(
    num_layers=2, width=16, num_heads=4, num_groups=2, head_width=8, vocab_size=37,
    compressed_length=8, compressed_stride=4, block_length=16, num_blocks=4, window=24,
)  # fmt: skip
# Around every edge: stride 4, compressed 8, block 16, window 24 and twice it, four blocks 64, more than is selected.
LENGTHS = (1, 2, 4, 5, 7, 8, 9, 12, 13, 15, 16, 17, 23, 24, 25, 31, 32, 33, 47, 48, 49, 63, 64, 65, 79, 80, 81, 97)


def lively(shape: NSAShape, dtype: torch.dtype = torch.float64) -> NSAModel:
    """A model whose weights are large enough that every path is felt."""
    torch.manual_seed(0)
    model = NSAModel(shape).to(dtype)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.5)
    return model


def random_memory(length: int, shape: NSAShape, *, batch: int = 2) -> tuple[Tensor, reference.Memory]:
    torch.manual_seed(length)
    width = shape.head_width
    query = torch.randn(batch, length, shape.num_heads, width, dtype=torch.float64, requires_grad=True)
    parts = torch.randn(6, batch, length, shape.num_groups, width, dtype=torch.float64, requires_grad=True)
    return query, reference.Memory(*parts)


@pytest.mark.parametrize("name", NSA_SHAPES)
def test_a_size_has_as_many_parameters_as_it_says(name: str) -> None:
    with torch.device("meta"):
        model = NSAModel(NSA_SHAPES[name])
    assert sum(weight.numel() for weight in model.parameters()) == count_parameters(NSA_SHAPES[name])


def test_the_model_called_125m_has_the_known_sizes() -> None:
    names = ("m7c", "m7c-bytes", "m7c-showcase")
    assert [count_parameters(NSA_SHAPES[name]) for name in names] == [155_096_868, 78_295_332, 254_499]


@pytest.mark.parametrize("length", LENGTHS)
def test_no_token_changes_what_was_predicted_before_it(length: int) -> None:
    model = lively(SMALL)
    ids = torch.randint(0, 37, (1, length))
    changed = ids.repeat(length, 1)  # row p has another token at place p
    place = torch.arange(length)
    changed[place, place] = (changed[place, place] + 1) % 37

    with torch.no_grad():
        before, after = model(ids), model(changed)

    moved = (after - before).abs().amax(dim=-1)
    assert moved.tril(-1).max() < 1e-12  # row p, places before p
    assert moved.diagonal().min() > 1e-6
    assert moved.triu(1).max() > 1e-6 or length == 1


def test_no_token_leaks_back_in_the_real_geometry() -> None:
    model = lively(NSAShape(num_layers=1, width=32, num_heads=2, num_groups=1, head_width=16, vocab_size=37))
    ids = torch.randint(0, 37, (1, 1100))
    with torch.no_grad():
        before = model(ids)
        for place in (1, 16, 31, 32, 47, 63, 64, 511, 512, 513, 1023, 1024, 1025, 1087, 1088, 1099):
            changed = ids.clone()
            changed[0, place] = (changed[0, place] + 1) % 37
            moved = (model(changed) - before).abs().amax(dim=-1)[0]
            assert moved[:place].max() < 1e-12
            assert moved[place] > 1e-6


@pytest.mark.parametrize("length", [48, 80])
def test_each_branch_reads_exactly_the_keys_it_may(length: int) -> None:
    query, memory = random_memory(length, SMALL, batch=1)
    found = reference.attend(query, memory, SMALL)
    for branch, first in ((found.compressed, 0), (found.selected, 2), (found.window, 4)):
        for t in range(length):
            gradient = torch.autograd.grad(branch[:, t].sum(), memory[first + 1], retain_graph=True)[0]
            read = {int(at) for at in gradient[0, :, 0].abs().sum(dim=-1).nonzero().flatten()}
            if first == 0:
                expected = set(range(4 * ((t + 1) // 4))) if t >= 7 else set()
            elif first == 4:
                expected = set(range(max(0, t - 23), t + 1))
            else:
                chosen = [int(block) for block in found.selection[0, 0, t] if block >= 0]
                expected = {at for block in chosen for at in range(16 * block, 16 * block + 16) if at <= t}
                assert {0, t // 16, max(0, t // 16 - 1)} <= set(chosen)
                assert len(chosen) == len(set(chosen)) == min(4, t // 16 + 1)
            assert read == expected


@pytest.mark.parametrize("length", [1, 17, 64])
def test_it_is_full_attention_where_everything_is_selected_and_inside_the_window(length: int) -> None:
    shape = replace(SMALL, window=64)
    query, memory = random_memory(length, shape)
    found = reference.attend(query, memory, shape)
    for branch, keys, values in ((found.selected, *memory[2:4]), (found.window, *memory[4:])):
        heads = (part.transpose(1, 2) for part in (query, keys, values))
        full = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(branch, full.transpose(1, 2))


def test_a_module_with_its_gates_on_two_full_branches_is_a_full_attention_module() -> None:
    torch.manual_seed(0)
    shape = replace(SMALL, window=64)
    module = SparseAttention(shape).double()
    with torch.no_grad():
        module.gate_out.bias.copy_(torch.tensor([-1e9, 0.0, 0.0]))
        # The same keys and values for both branches.
        module.memory.weight.view(6, -1, 16)[4:] = module.memory.weight.view(6, -1, 16)[2:4]
        module.gate_out.weight[1] = module.gate_out.weight[2]
    normed = torch.randn(2, 50, 16, dtype=torch.float64)

    query = module.query(normed).unflatten(-1, (4, 8))
    keys, values = module.memory(normed).unflatten(-1, (6, 2, 8)).unbind(2)[2:4]
    turns = rotary_turns(50, 8, shape.rotary_base, normed.device)
    heads = (part.transpose(1, 2) for part in (rotate(query, turns), rotate(keys, turns), values))
    full = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(module(normed), module.projection(full.transpose(1, 2).flatten(2)))


def test_a_turned_query_and_key_know_their_distance_alone() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 8, dtype=torch.float64)
    turns = rotary_turns(40, 8, 10_000.0, query.device)
    queries, keys = (rotate(part.expand(1, 40, 1, 8), turns)[0, :, 0] for part in (query, key))
    scores = queries @ keys.T
    for distance in (0, 1, 7, 30):
        along = scores.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), atol=1e-5, rtol=0)


@pytest.mark.parametrize("length", [5, 20, 70])
def test_gradients_are_those_of_finite_differences_in_float64(length: int) -> None:
    shape = replace(SMALL, num_heads=2, num_groups=1, head_width=4)
    query, memory = random_memory(length, shape, batch=1)

    def read(query: Tensor, *parts: Tensor) -> Tensor:
        found = reference.attend(query, reference.Memory(*parts), shape)
        return torch.cat([found.compressed, found.selected, found.window])

    parts = tuple(part.detach().requires_grad_() for part in memory)
    assert torch.autograd.gradcheck(read, (query, *parts), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [3, 40, 90])
def test_loss_and_gradients_agree_with_float64(dtype: torch.dtype, length: int) -> None:
    torch.manual_seed(0)
    exact = NSAModel(SMALL).double()
    low = NSAModel(SMALL).to(dtype)
    low.load_state_dict(exact.state_dict())
    exact.load_state_dict(low.state_dict())  # what rounding the weights changed is not under test
    ids, targets = torch.randint(0, 37, (2, 2, length))
    losses = [model(ids, targets) for model in (exact, low)]
    for loss in losses:
        loss.backward()

    loose = 1e-4 if dtype == torch.float32 else 0.1  # a score that rounds the other way selects another block
    assert abs(losses[1].item() / losses[0].item() - 1) < loose / 10
    for (name, right), left in zip(exact.named_parameters(), low.parameters(), strict=True):
        assert right.grad is not None and left.grad is not None
        assert right.grad.norm() > 0, name
        if "gate" not in name:  # these gradients are differences of nearly equal numbers
            assert (left.grad.double() - right.grad).norm() <= loose * right.grad.norm(), name


def test_autocast_gives_nearly_the_loss_of_float32() -> None:
    torch.manual_seed(0)
    model = NSAModel(SMALL)
    ids, targets = torch.randint(0, 37, (2, 2, 90))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model(ids, targets)
    low.backward()
    assert abs(low.item() / model(ids, targets).item() - 1) < 1e-3
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


def test_random_bytes_cannot_be_predicted() -> None:
    """A leak of the next token or unshifted targets would go under ln 256 = 5.545, which no model can."""
    torch.manual_seed(0)
    shape = replace(SMALL, width=32, vocab_size=256)
    model = NSAModel(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(120):
        rows = torch.randint(0, 256, (8, 49))  # 48 = twice the window: where the window once read the next token
        loss = model(rows[:, :-1], rows[:, 1:]) / (8 * 48)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses) >= 5.5
    assert sum(losses[-20:]) / 20 < math.log(256) + 0.15  # and it did learn that all bytes are alike


def test_the_same_training_finds_a_leak_that_is_there() -> None:
    """The test above can fail: with the inputs as targets it would."""
    torch.manual_seed(0)
    model = NSAModel(replace(SMALL, width=32, vocab_size=256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(30):
        rows = torch.randint(0, 256, (8, 48))
        loss = model(rows, rows) / (8 * 48)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 5.3


def test_rows_of_different_lengths_in_one_batch_are_as_if_alone() -> None:
    model = lively(SMALL)
    lengths = (1, 9, 40, 81)
    batch, targets = torch.randint(0, 37, (2, len(lengths), 81))
    for row, length in enumerate(lengths):
        batch[row, length:] = 0
        targets[row, length:] = IGNORED

    together = model(batch)
    alone = [model(batch[row : row + 1, :length]) for row, length in enumerate(lengths)]
    for row, length in enumerate(lengths):
        torch.testing.assert_close(together[row, :length], alone[row][0])
    losses = [
        model(batch[row : row + 1, :length], targets[row : row + 1, :length]) for row, length in enumerate(lengths)
    ]
    torch.testing.assert_close(model(batch, targets), torch.stack(losses).sum(), check_dtype=False)


def test_recomputing_and_chunks_change_neither_loss_nor_gradients() -> None:
    model = lively(SMALL, torch.float32)
    ids, targets = torch.randint(0, 37, (2, 2, 81))
    found = []
    for is_recomputing, chunk_rows in ((False, 0), (True, 0), (True, 50)):
        model.is_recomputing, model.loss_chunk_rows = is_recomputing, chunk_rows
        model.zero_grad()
        loss = model(ids, targets)
        loss.backward()
        found.append([loss.detach(), *(weight.grad for weight in model.parameters())])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-4)


def test_statistics_say_what_gates_and_selection_do() -> None:
    torch.manual_seed(0)
    model = NSAModel(SMALL)
    facts = model.statistics(torch.randint(0, 37, (1, 128)))

    assert sum(facts[f"gate_{name}"] for name in ("compressed", "selected", "window")) == pytest.approx(1, abs=1e-5)
    assert facts["gate_entropy"] == pytest.approx(math.log(3), abs=1e-2)
    assert facts["gate_max"] == pytest.approx(1 / 3, abs=0.05)
    assert facts["gate_collapsed"] == 0
    # 16 queries see 1 block, 16 see 2, 16 see 3, the other 80 choose 4.
    assert facts["selected_blocks"] == pytest.approx((16 * (1 + 2 + 3) + 80 * 4) / 128)
    reads = [min(t + 1, 3 * 16 + t % 16 + 1) / (t + 1) for t in range(128)]
    assert facts["selected_coverage"] == pytest.approx(sum(reads) / 128, abs=1e-5)
    assert 0 < facts["selected_far"] < 0.5
    assert facts["selected_blocks_most"] == 4


def test_statistics_name_the_layer_whose_gate_has_collapsed() -> None:
    torch.manual_seed(0)
    model = NSAModel(SMALL)
    with torch.no_grad():
        model.blocks[1].attention.gate_out.bias.copy_(torch.tensor([0.0, 9.0, 0.0]))
    facts = model.statistics(torch.randint(0, 37, (1, 40)))

    assert facts["gate_entropy"] > 0.5 and facts["gate_max"] < 0.7  # the mean of both layers looks healthy
    assert facts["gate_entropy_least"] < 0.01 and facts["gate_max_most"] > 0.99
    assert facts["gate_worst_layer"] == 2
    assert facts["gate_collapsed"] == 0.5


def test_the_whole_model_is_one_graph_for_a_compiler() -> None:
    torch.manual_seed(0)
    model = NSAModel(replace(SMALL, num_layers=1), is_recomputing=True)
    ids, targets = torch.randint(0, 37, (2, 2, 81))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    torch._dynamo.utils.counters.clear()
    found = []
    for road in (model, compiled):
        model.zero_grad()
        loss = road(ids, targets)
        loss.backward()
        found.append([loss.detach(), *(weight.grad for weight in model.parameters())])
    torch.testing.assert_close(found[1], found[0])
    model.statistics(ids)  # now and then in a training: it must not cost a compilation
    compiled(ids, targets)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch.compiler.reset()
