"""The index arithmetic of sparse attention, against loops that spell it out."""

from __future__ import annotations

import pytest
import torch

from jackline.errors import UsageError
from jackline.models.nsa import blocks
from jackline.models.nsa.shape import NSAShape, count_parameters, flops_per_token

SMALL = NSAShape(
    num_layers=2, width=16, num_heads=4, num_groups=2, head_width=8, vocab_size=37,
    compressed_length=8, compressed_stride=4, block_length=16, num_blocks=4, window=24,
)  # fmt: skip
LENGTHS = (1, 7, 8, 9, 11, 12, 13, 16, 33, 64, 65, 100)


@pytest.mark.parametrize("length", LENGTHS)
def test_compressed_blocks_are_the_averages_of_their_tokens(length: int) -> None:
    tokens = torch.randn(2, length, 3, dtype=torch.float64)

    found = blocks.compress(tokens, SMALL)

    expected = [tokens[:, at : at + 8].mean(dim=1) for at in range(0, length - 7, 4)]
    assert found.shape[1] == len(expected) == SMALL.num_compressed(length)
    for number, block in enumerate(expected):
        torch.testing.assert_close(found[:, number], block)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_query_sees_the_compressed_blocks_that_ended(length: int) -> None:
    seen = blocks.visible_compressed(length, SMALL, torch.device("cpu"))

    counts = [0 if t + 1 < 8 else (t + 1 - 8) // 4 + 1 for t in range(length)]
    assert seen.sum(dim=1).tolist() == counts
    for t, count in enumerate(counts):
        assert seen[t, :count].all()


def test_a_compressed_block_gives_each_selection_block_its_overlap() -> None:
    shape = NSAShape()
    matrix = blocks.to_block_scores(torch.eye(shape.num_compressed(1024)), 1024, shape)

    assert blocks.overlap_weights(shape) == [(-1, 0.5), (0, 1.0), (1, 1.0), (2, 1.0), (3, 0.5)]
    assert torch.equal(matrix.sum(dim=1), torch.ones(63))
    for offset, weight in blocks.overlap_weights(shape):
        for block in range(1, 15):
            assert matrix[4 * block + offset, block] == weight


def test_blunt_scores_leave_room_for_the_number_of_their_block() -> None:
    near = 1.0 + 1e-4
    scores = torch.tensor([0.0, float("inf"), 1.0, near, 1.5], dtype=torch.float64)

    assert blocks.blunt(scores).tolist() == [
        0.0,
        float("inf"),
        1.0,
        torch.tensor(near).item() // 2**-20 * 2**-20,
        1.5,
    ]
    assert blocks.blunt(torch.cat((scores, torch.zeros(1019)))).tolist()[:5] == [0.0, float("inf"), 1.0, 1.0, 1.5]


def test_first_and_local_blocks_are_kept_and_ties_go_to_the_earlier_block() -> None:
    scores = torch.zeros(1, 112, 7)
    scores[..., 4] = 1.0

    picked = blocks.pick_blocks(scores, SMALL)[0]

    assert [set(picked[t].tolist()) for t in (0, 15, 16, 63, 64, 79, 80, 96, 111)] == [
        {0, -1},
        {0, -1},
        {0, 1, -1},
        {0, 1, 2, 3},
        {0, 1, 3, 4},
        {0, 1, 3, 4},
        {0, 1, 4, 5},
        {0, 4, 5, 6},
        {0, 4, 5, 6},
    ]


def test_where_all_blocks_fit_the_choice_needs_no_scores() -> None:
    picked = blocks.pick_blocks(torch.rand(2, 2, 61, 4), SMALL)
    everything = blocks.every_block(2, 61, SMALL, torch.device("cpu"))

    assert torch.equal(picked.sort(dim=-1).values, everything.sort(dim=-1).values)


def test_selected_blocks_become_tokens_up_to_the_query() -> None:
    selection = torch.tensor([[0, -1], [0, 2], [1, 2]])[None].expand(1, 3, 2)
    seen = blocks.visible_in_blocks(torch.cat([selection] * 4, dim=1)[:, :10], 10, 4)

    assert seen[0, 1].nonzero().flatten().tolist() == [0, 1]
    assert seen[0, 9].nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert seen[0, 8].nonzero().flatten().tolist() == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("length", [5, 64, 150])
def test_work_per_token_counts_the_keys_that_are_read(length: int) -> None:
    device = torch.device("cpu")
    chosen = blocks.pick_blocks(torch.rand(length, SMALL.num_selectable(length)), SMALL)
    reads = blocks.visible_compressed(length, SMALL, device).sum()
    reads += blocks.visible_in_window(length, SMALL.window, device).sum()
    reads += blocks.visible_in_blocks(chosen, length, SMALL.block_length).sum()

    weights = count_parameters(SMALL) - SMALL.vocab_size * SMALL.width  # an embedding is looked up
    assert flops_per_token(SMALL, length) == pytest.approx(6 * weights + 12 * 2 * 32 * int(reads) / length)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"num_groups": 5}, "12 heads cannot be shared by 5 key/value groups"),
        ({"head_width": 7}, "head_width 7 is odd; rotary positions turn pairs"),
        ({"compressed_length": 40}, "compressed_length 40 is not a multiple of compressed_stride 16"),
        ({"block_length": 8}, "block_length 8 is not a multiple of compressed_stride 16"),
        ({"num_blocks": 2}, "num_blocks 2 has no room for block 0 and the 2 local blocks"),
        (
            {"compressed_length": 1040},
            "compressed_length 1040 is longer than all 16 selected blocks: there would be nothing to choose them by",
        ),
        ({"window": 0}, "num_local and window must be at least 1: a token always sees itself"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(words: dict[str, int], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        NSAShape(**words)
    assert str(caught.value) == f"error: {text}"
