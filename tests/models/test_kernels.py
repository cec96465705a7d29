"""The kernels against references in float64, and the paged attention against a dense one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import pytest
import torch

from slipstream.engine.batch import Batch, Chunk
from slipstream.engine.request import Request, SamplingParams
from slipstream.models.cpu_llama import step_arrays
from slipstream.models.kernels import cpu_attention, cpu_rows
from slipstream.models.kernels.cpu_math import OPTIONS, exp
from slipstream.models.kernels.cpu_step import Heads
from slipstream.models.kernels.cpu_team import make_team
from slipstream.models.kernels.torch_ops import TorchKernels
from slipstream.models.rope import rotary_tables
from slipstream.models.step_input import StepInput

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 16, 16
SHAPE = (HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE)
NUM_BLOCKS = 40
WIDTH = (HEADS + 2 * KV_HEADS) * HEAD_DIM
NO_NORM = np.zeros(0, np.float32)
# Half a unit in the last place of float32, relative.
EPS = 2.0**-24


def torch_kernels() -> TorchKernels:
    return TorchKernels(*SHAPE, device=torch.device("cpu"), dtype=torch.float32)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@numba.njit(**{**OPTIONS, "cache": False})
def exp_of_all(x, out):  # type: ignore[no-untyped-def]
    for i in range(x.shape[0]):
        out[i] = exp(x[i])


# --- between the matmuls


def test_exp_is_accurate_over_its_whole_range() -> None:
    """To 4e-7 relative, as it promises; exact at 0, and clamped beyond."""
    x = np.concatenate([np.linspace(-87, 88, 400_001), [0.0, -87.0, 88.0, -1e-30, 1e-30]]).astype(np.float32)
    out = np.empty_like(x)
    exp_of_all(x, out)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(out / exact - 1).max() < 4e-7
    edges = np.array([-1e4, -88.0, 89.0, 1e4, 0.0], np.float32)
    out = np.empty_like(edges)
    exp_of_all(edges, out)
    assert out[0] == out[1] < 1.7e-38
    assert out[2] == out[3] > 1.6e38
    assert out[4] == 1.0


def on_threads(count: int, kernel: Any, *arguments: Any) -> None:
    """Run a kernel by a team of threads."""
    team = make_team(count)
    with ThreadPoolExecutor(count) as pool:
        for run in [pool.submit(kernel, team, *arguments) for _ in range(count)]:
            run.result()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_rms_norm(rows: int, threads: int) -> None:
    """A sum of 64 squares and three products: a relative error of a few units in the last place."""
    x, weight = random(rows, 64, scale=3.0), random(64, seed=1)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    out = torch.empty(rows, 64)
    on_threads(threads, cpu_rows.rms_norm, x.numpy(), rows, weight.numpy(), np.float32(1e-5), out.numpy())
    for found in (out, torch_kernels().rms_norm(x, weight, 1e-5)):
        torch.testing.assert_close(found.double(), exact, rtol=16 * EPS, atol=1e-12)


def test_add_rms_norm_adds_in_place_and_leaves_rows_beyond_the_batch() -> None:
    delta, residual, weight = random(6, 64), random(6, 64, seed=1), random(64, seed=2)
    summed, changed, out = residual + delta, residual.clone(), torch.zeros(6, 64)
    arrays = (delta.numpy(), changed.numpy(), 4, weight.numpy(), np.float32(1e-5), out.numpy())
    on_threads(1, cpu_rows.add_rms_norm, *arrays)
    assert torch.equal(changed[:4], summed[:4])
    assert torch.equal(changed[4:], residual[4:])
    normed = torch_kernels().rms_norm(summed, weight, 1e-5)
    torch.testing.assert_close(out[:4], normed[:4], rtol=16 * EPS, atol=1e-12)
    assert not out[4:].any()
    assert torch.equal(torch_kernels().add_rms_norm(delta, residual, weight, 1e-5), normed)


def test_selected_rows_are_normed_without_a_trace_and_as_often_as_asked_for() -> None:
    delta, residual, weight = random(6, 64), random(6, 64, seed=1), random(64, seed=2)
    rows, out, before = np.array([5, 2, 2]), torch.zeros(6, 64), residual.clone()
    arrays = (delta.numpy(), residual.numpy(), rows, weight.numpy(), np.float32(1e-5), out.numpy())
    on_threads(1, cpu_rows.select_rms_norm, *arrays)
    normed = torch_kernels().rms_norm(residual + delta, weight, 1e-5)
    torch.testing.assert_close(out[:3], normed[rows], rtol=16 * EPS, atol=1e-12)
    assert torch.equal(residual, before)


def test_head_norm_normalises_the_named_heads_and_no_others() -> None:
    qkv, weight = random(5, WIDTH), random(HEAD_DIM, seed=1)
    heads = qkv.double().unflatten(1, (-1, HEAD_DIM))
    exact = heads.clone()
    exact[:, 4:6] = (heads / (heads.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double())[:, 4:6]
    changed = qkv.clone()
    torch_kernels().head_norm(changed, HEADS, KV_HEADS, weight, 1e-6)
    torch.testing.assert_close(changed.double(), exact.flatten(1), rtol=16 * EPS, atol=1e-12)
    assert torch.equal(changed[:, : HEADS * HEAD_DIM], qkv[:, : HEADS * HEAD_DIM])


def test_silu_mul() -> None:
    """Gates from -60 to 60."""
    gate_up = random(50, 96, scale=20.0)
    gate, up = gate_up.double().chunk(2, dim=-1)
    exact = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(torch_kernels().silu_mul(gate_up).double(), exact, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_highest_logit_is_found_with_its_lowest_id(threads: int) -> None:
    """Of a vocabulary that is no multiple of 16, whose filling must not count."""
    logits = random(9, 112)
    logits[:, 100:] = 1e9
    logits[1, [7, 50, 99]] = 10.0
    logits[2] = -torch.inf
    logits[3, 40], logits[4, 99], logits[5, 0] = torch.nan, torch.inf, torch.nan
    logits[6, 3] = -torch.inf
    best, ids = np.empty(9, np.float32), np.empty(9, np.int64)
    on_threads(threads, cpu_rows.find_highest, logits.numpy(), 9, 100, best, ids)
    expected, expected_ids = logits[:, :100].max(-1)
    np.testing.assert_array_equal(best, expected.numpy())
    known = ~np.isnan(best)
    assert known.sum() == 7
    assert ids[known].tolist() == expected_ids[known].tolist()


# --- attention


def chunk(length: int, start: int, table: list[int], padding: int = 0) -> Chunk:
    """A chunk of a sequence that holds those blocks."""
    request = Request((b"", 0), [0] * (start + length - padding), SamplingParams(max_tokens=1), 0.0)
    request.block_table, request.padding = table, padding
    return Chunk(request, [0] * length, start, sample=True)


def ragged_batch() -> Batch:
    """Prompts, chunks in the middle of a prompt, single tokens and left-padded rows, in scattered blocks."""
    order = np.random.default_rng(0).permutation(NUM_BLOCKS).tolist()
    return Batch(
        [
            chunk(1, 0, order[0:1]),
            chunk(33, 0, order[1:4]),
            chunk(1, 47, order[4:7]),
            chunk(20, 29, order[7:11]),
            chunk(1, 99, order[11:18]),
            chunk(30, 0, order[18:20], padding=13),
            chunk(1, 40, order[20:23], padding=17),
            chunk(16, 16, order[23:25]),
        ]
    )


def filled_caches() -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of every slot, [NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM]."""
    shape = (NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    return random(*shape, seed=5), random(*shape, seed=6)


def run_cpu(
    qkv: torch.Tensor, step: StepInput, cos: Any, sin: Any, threads: int = 1, norms: tuple[Any, Any] = (NO_NORM,) * 2
) -> tuple[torch.Tensor, ...]:
    """Rotate, store and attend; the output, and the cache [NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM]."""
    heads, arrays = Heads(HEADS, KV_HEADS, HEAD_DIM), step_arrays(step)
    keys, values = (part.numpy() for part in filled_caches())
    # Panels of 16 keys, and of 16 dimensions.
    keys = np.ascontiguousarray(keys.reshape(NUM_BLOCKS, KV_HEADS, -1, 16, HEAD_DIM).transpose(0, 1, 2, 4, 3))
    values = np.ascontiguousarray(values.reshape(NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, -1, 16).transpose(0, 1, 3, 2, 4))
    tables = (cos.numpy(), sin.numpy())
    epsilon = np.float32(1e-6)
    on_threads(threads, cpu_rows.rotate_and_store, heads, qkv.numpy(), *norms, epsilon, keys, values, arrays, *tables)
    queries = cpu_attention.ROWS_OF_TILE * HEADS // KV_HEADS
    out = torch.empty(step.num_tokens, HEADS * HEAD_DIM)
    width = int(step.context_end.max()) + 2 * BLOCK_SIZE

    def attend(team: Any) -> None:
        own = np.empty(queries * HEAD_DIM, np.float32), np.full((queries, width), np.nan, np.float32)
        cpu_attention.attention(team, heads, qkv.numpy(), keys, values, arrays, *own, out.numpy())

    on_threads(threads, attend)
    keys = keys.transpose(0, 1, 2, 4, 3).reshape(NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    values = values.transpose(0, 1, 3, 2, 4).reshape(NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    return out, torch.from_numpy(keys), torch.from_numpy(values)


def run_torch(qkv: torch.Tensor, step: StepInput, cos: Any, sin: Any) -> tuple[torch.Tensor, ...]:
    kernels = torch_kernels()
    cache = kernels.allocate_cache(NUM_BLOCKS)
    for own, part in zip((cache.keys, cache.values), filled_caches(), strict=True):
        own.copy_(part.transpose(1, 2).flatten(0, 1))
    arrays = kernels.prepare(step)
    kernels.rotate_and_store(qkv, cache, arrays, cos, sin)
    out = kernels.attention(qkv, cache, arrays)
    paged = [part.unflatten(0, (NUM_BLOCKS, BLOCK_SIZE)).transpose(1, 2) for part in (cache.keys, cache.values)]
    return out, *paged


def rotated(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding in float64 in its complex form: x [rows, heads, head_dim], positions [rows]."""
    low, high = x.double().chunk(2, dim=-1)
    frequencies = theta ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    turned = torch.complex(low, high) * torch.exp(1j * positions.double()[:, None] * frequencies)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def dense_reference(qkv: torch.Tensor, batch: Batch, theta: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention row by row in float64 over contiguous keys; what it should leave in the cache."""
    keys, values = (part.double() for part in filled_caches())
    heads = qkv.double().unflatten(1, (-1, HEAD_DIM))
    cached = torch.cat([torch.arange(c.start, c.start + c.num_tokens) for c in batch.chunks])
    padding = torch.cat([torch.full((c.num_tokens,), c.request.padding) for c in batch.chunks])
    positions = (cached - padding).clamp(min=0)
    queries = rotated(heads[:, :HEADS], positions, theta)
    new_keys, new_values = rotated(heads[:, HEADS : HEADS + KV_HEADS], positions, theta), heads[:, HEADS + KV_HEADS :]
    out, row = torch.empty(len(qkv), HEADS, HEAD_DIM, dtype=torch.float64), 0
    for c in batch.chunks:
        table = c.request.block_table
        for slot in range(c.start, c.start + c.num_tokens):
            block, offset = table[slot // BLOCK_SIZE], slot % BLOCK_SIZE
            keys[block, :, offset], values[block, :, offset] = new_keys[row], new_values[row]
            first = c.request.padding if slot >= c.request.padding else 0
            # [KV_HEADS, context, HEAD_DIM], then one KV head for each query head
            context_keys = keys[table].transpose(0, 1).flatten(1, 2)[:, first : slot + 1]
            context_values = values[table].transpose(0, 1).flatten(1, 2)[:, first : slot + 1]
            context_keys = context_keys.repeat_interleave(HEADS // KV_HEADS, 0)
            context_values = context_values.repeat_interleave(HEADS // KV_HEADS, 0)
            scores = (context_keys @ queries[row][:, :, None])[:, :, 0] * HEAD_DIM**-0.5
            out[row] = (torch.softmax(scores, -1)[:, None] @ context_values)[:, 0]
            row += 1
    return out.flatten(1), keys, values


@pytest.mark.parametrize("path", ["cpu", "cpu, two threads", "torch"])
def test_paged_attention_equals_the_dense_one(path: str) -> None:
    """Against float64. Scores are sums of 16 products of size up to about 30: an absolute error of 16 x 30 x EPS = 3e-5
    at worst, a tenth of it in practice, which is the relative error of a softmax weight; outputs are averages of
    values of size 1."""
    batch = ragged_batch()
    step = StepInput.from_batch(batch, BLOCK_SIZE)
    cos, sin = rotary_tables({"rope_theta": 1e4, "rope_type": "default"}, HEAD_DIM, 256, torch.device("cpu"))
    qkv = random(step.num_tokens, WIDTH, seed=9, scale=1.5)
    exact = dense_reference(qkv, batch, 1e4)
    if path == "torch":
        results = run_torch(qkv.clone(), step, cos, sin)
    else:
        results = run_cpu(qkv.clone(), step, cos, sin, threads=1 if path == "cpu" else 2)
    for result, expected in zip(results, exact, strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=5e-6)


def test_one_thread_and_two_give_the_same_bits() -> None:
    step = StepInput.from_batch(ragged_batch(), BLOCK_SIZE)
    cos, sin = rotary_tables({"rope_theta": 1e4, "rope_type": "default"}, HEAD_DIM, 256, torch.device("cpu"))
    qkv = random(step.num_tokens, WIDTH, seed=9)
    assert torch.equal(run_cpu(qkv.clone(), step, cos, sin, 1)[0], run_cpu(qkv.clone(), step, cos, sin, 2)[0])


def test_heads_are_normed_before_they_are_rotated() -> None:
    """Qwen3: queries and keys, each by its own weights, and no values."""
    step = StepInput.from_batch(ragged_batch(), BLOCK_SIZE)
    cos, sin = rotary_tables({"rope_theta": 1e4, "rope_type": "default"}, HEAD_DIM, 256, torch.device("cpu"))
    qkv, norms = random(step.num_tokens, WIDTH, seed=9), (random(HEAD_DIM, seed=1), random(HEAD_DIM, seed=2))
    found = run_cpu(qkv.clone(), step, cos, sin, norms=tuple(norm.numpy() for norm in norms))
    kernels, normed = torch_kernels(), qkv.clone()
    kernels.head_norm(normed, 0, HEADS, norms[0], 1e-6)
    kernels.head_norm(normed, HEADS, KV_HEADS, norms[1], 1e-6)
    for result, expected in zip(found, run_torch(normed, step, cos, sin), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=5e-6)


def test_a_rows_attention_does_not_depend_on_what_lies_beside_it_in_its_blocks() -> None:
    """Keys and values of places that it does not attend to may be anything, such as what a broken request left."""
    cos, sin = rotary_tables({"rope_theta": 1e4, "rope_type": "default"}, HEAD_DIM, 256, torch.device("cpu"))
    step = StepInput.from_batch(Batch([chunk(1, 20, [3, 1], padding=5)]), BLOCK_SIZE)
    qkv = random(1, WIDTH)
    expected = run_cpu(qkv.clone(), step, cos, sin)[0]
    attended = np.zeros((NUM_BLOCKS, BLOCK_SIZE), bool)
    attended[3, 5:], attended[1, :5] = True, True
    poisoned = [part.clone() for part in filled_caches()]
    for part in poisoned:
        part.transpose(1, 2)[torch.from_numpy(~attended)] = torch.nan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.filled_caches", lambda: tuple(poisoned))
        assert torch.equal(run_cpu(qkv.clone(), step, cos, sin)[0], expected)


@pytest.mark.parametrize("huge", [60.0, 1000.0])
def test_scores_of_any_size_give_a_finite_softmax(huge: float) -> None:
    step = StepInput.from_batch(Batch([chunk(20, 0, [0, 1])]), BLOCK_SIZE)
    cos, sin = rotary_tables({"rope_theta": 1e4, "rope_type": "default"}, HEAD_DIM, 256, torch.device("cpu"))
    qkv = random(20, WIDTH, scale=huge)
    out = run_cpu(qkv.clone(), step, cos, sin)[0]
    assert torch.isfinite(out).all()
    assert torch.isfinite(run_torch(qkv.clone(), step, cos, sin)[0]).all()
    # The first token attends to itself alone: its output is its own value.
    value = qkv[0, (HEADS + KV_HEADS) * HEAD_DIM :].unflatten(0, (KV_HEADS, HEAD_DIM))
    assert torch.equal(out[0], value.repeat_interleave(HEADS // KV_HEADS, 0).flatten())
