"""How a batch is laid out for the model, worked out by hand for blocks of 8."""

from __future__ import annotations

from slipstream.engine.batch import Batch, Chunk
from slipstream.engine.request import Request, SamplingParams
from slipstream.models.step_input import StepInput


def chunk(token_ids: list[int], start: int, table: list[int], *, padding: int = 0, sample: bool = True) -> Chunk:
    request = Request((b"", 0), [0] * (start + len(token_ids)), SamplingParams(max_tokens=1), 0.0)
    request.block_table, request.padding = table, padding
    return Chunk(request, token_ids, start, sample)


def test_a_chunk_of_a_prompt_and_a_decode_token_lie_one_after_the_other() -> None:
    step = StepInput.from_batch(
        Batch([chunk([10, 11, 12, 13], 6, [5, 2, 9], sample=False), chunk([20], 8, [1, 7])]), block_size=8
    )
    assert step.token_ids.tolist() == [10, 11, 12, 13, 20]
    assert step.positions.tolist() == [6, 7, 8, 9, 8]
    assert step.slots.tolist() == [46, 47, 16, 17, 56]
    assert step.sequences.tolist() == [0, 0, 0, 0, 1]
    assert step.context_start.tolist() == [0, 0, 0, 0, 0]
    assert step.context_end.tolist() == [7, 8, 9, 10, 9]
    assert step.block_tables.tolist() == [[5, 2, 9], [1, 7, 0]]
    assert step.logit_rows.tolist() == [4]
    assert step.num_tokens == 5


def test_left_padding_takes_slots_but_no_positions() -> None:
    """Padding attends to the padding before it; the row's own tokens attend to none of it."""
    step = StepInput.from_batch(
        Batch([chunk([0, 0, 10, 11], 0, [3], padding=2), chunk([20, 21, 22, 23], 0, [4])]), block_size=8
    )
    assert step.positions.tolist() == [0, 0, 0, 1, 0, 1, 2, 3]
    assert step.slots.tolist() == [24, 25, 26, 27, 32, 33, 34, 35]
    assert step.context_start.tolist() == [0, 0, 2, 2, 0, 0, 0, 0]
    assert step.context_end.tolist() == [1, 2, 3, 4, 1, 2, 3, 4]
    assert step.logit_rows.tolist() == [3, 7]


def test_later_tokens_of_a_padded_row_go_on_behind_it() -> None:
    step = StepInput.from_batch(Batch([chunk([12], 9, [3, 6], padding=2)]), block_size=8)
    assert step.positions.tolist() == [7]
    assert step.slots.tolist() == [49]
    assert (step.context_start.tolist(), step.context_end.tolist()) == ([2], [10])
