"""A batch as flat arrays: what the model and the kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np

from slipstream.engine.batch import Batch


@dataclass(slots=True)
class StepInput:
    """One row for each token of the batch, sequence by sequence; no row is padding unless a policy computes it.

    A row attends to the cache slots `context_start` to `context_end` (exclusive) of its sequence, counted with the
    sequence's left padding; its own slot is the last of them.
    """

    token_ids: np.ndarray  # [num_tokens] int64
    positions: np.ndarray  # [num_tokens] int32, for the rotary embedding: padding is not counted
    slots: np.ndarray  # [num_tokens] int32, block * block_size + offset
    sequences: np.ndarray  # [num_tokens] int32, row of block_tables
    context_start: np.ndarray  # [num_tokens] int32
    context_end: np.ndarray  # [num_tokens] int32
    block_tables: np.ndarray  # [num_sequences, most blocks of a sequence] int32
    logit_rows: np.ndarray  # [num_rows] int64, the last row of each sampled chunk, then those that score a prompt

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @classmethod
    def from_batch(cls, batch: Batch, block_size: int) -> StepInput:
        """Lay out the chunks of a batch one after the other."""
        chunks = batch.chunks
        counts = np.array([chunk.num_tokens for chunk in chunks], np.int64)
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        paddings = np.array([chunk.request.padding for chunk in chunks], np.int32)
        ends = np.cumsum(counts)
        num_tokens = int(ends[-1])

        tables = np.zeros((len(chunks), max(len(chunk.request.block_table) for chunk in chunks)), np.int32)
        for row, chunk in zip(tables, chunks, strict=True):
            row[: len(chunk.request.block_table)] = chunk.request.block_table

        sequences = np.repeat(np.arange(len(chunks), dtype=np.int32), counts)
        cached = (np.arange(num_tokens) - np.repeat(ends - counts - starts, counts)).astype(np.int32)
        padding = paddings[sequences]
        is_padding = cached < padding
        num_scored = [len(chunk.scored_ids) for chunk in chunks]
        firsts = (ends - counts).tolist()
        scored = [np.arange(first, first + number) for first, number in zip(firsts, num_scored, strict=True) if number]
        return cls(
            token_ids=np.fromiter(chain.from_iterable(chunk.token_ids for chunk in chunks), np.int64, num_tokens),
            positions=np.maximum(cached - padding, 0),
            slots=tables[sequences, cached // block_size] * block_size + cached % block_size,
            sequences=sequences,
            # Padding attends to the padding before it, so that it costs what it costs anywhere.
            context_start=np.where(is_padding, np.int32(0), padding),
            context_end=cached + 1,
            block_tables=tables,
            logit_rows=np.concatenate([ends[[chunk.sample for chunk in chunks]] - 1, *scored]),
        )
