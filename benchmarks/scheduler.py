"""The continuous scheduler alone, without a model: `python -m benchmarks.scheduler [--json]`.

* cost: CPU time of a step outside the model, by number of running sequences.
* admission: how often the optimistic forecast is wrong, with a pool as large as what all seats hold in the end, and
  with half of it.
* fairness: queue times and shares of tokens under `queue_order: fair`, on a simulated clock on which a step takes
  10 ms + 2 ms for each of its rows, about as on two CPU cores with the demo's model.

All with the engine as it is; only the runner under it computes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from slipstream.config import EngineConfig
from slipstream.engine.batch import Batch, StepOutput
from slipstream.engine.engine import Engine
from slipstream.engine.request import Request, SamplingParams
from slipstream_client.load.workload import make_workload

STEP_S, ROW_S = 0.010, 0.002
BLOCK_SIZE = 16
# Of a step, in seconds: a constant and a part for each running sequence.
BAR_STEP_S, BAR_SEQUENCE_S = 1e-3, 5e-6
BAR_PREEMPTED, BAR_MOST_PREEMPTIONS = 0.10, 4
BAR_QUEUE_RATIO, BAR_SHARE, SHARE_WINDOW_S = 0.1, 0.8, 30.0


@dataclass(frozen=True)
class Figure:
    """One measured value beside the bar that it is held to."""

    part: str
    case: str
    value: float
    bar: float | None
    unit: str = ""
    at_least: bool = False

    def __str__(self) -> str:
        bar, verdict = "", ""
        if self.bar is not None:
            bar = f"{'>=' if self.at_least else '<='} {self.bar:.4g}"
            met = self.value >= self.bar if self.at_least else self.value <= self.bar
            verdict = "" if met else "  MISSED"
        return f"{self.part:<10} {self.case:<68} {self.value:9.3g} {bar:>9} {self.unit}{verdict}"


class IdleRunner:
    """Implements `slipstream.models.runner.Runner` and computes nothing: every token is the same."""

    device_name = "none"
    batch_invariant = True
    eos_token_ids: frozenset[int] = frozenset()
    vocab_size = 1 << 16
    max_model_len = 1 << 20

    def __init__(self, num_blocks: int, token_budget: int = 128) -> None:
        self.num_blocks = num_blocks
        self.token_budget = token_budget

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """See Runner.copy_blocks."""

    def run(self, batch: Batch) -> StepOutput:
        """See Runner.run."""
        return StepOutput([1] * len(batch.sampled))


class SimulatedRunner(IdleRunner):
    """Takes as long as the step-time model says, on a clock of its own, and notes who got how many tokens when."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.now = 0.0
        self.steps: list[tuple[float, Counter[str]]] = []  # (end, tokens by tenant)

    def clock(self) -> float:
        return self.now

    def run(self, batch: Batch) -> StepOutput:
        """See Runner.run."""
        self.now += STEP_S + ROW_S * batch.num_tokens
        tokens: Counter[str] = Counter()
        for chunk in batch.chunks:
            tokens[chunk.request.tenant] += chunk.num_tokens
        self.steps.append((self.now, tokens))
        return super().run(batch)


def main() -> None:
    """Run all parts and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = [*cost(), *admission(), *fairness()]
    if arguments.json:
        print(json.dumps({"version": 1, "figures": [dataclasses.asdict(figure) for figure in figures]}, indent=1))
        return
    print(f"{'part':<10} {'case':<68} {'value':>9} {'bar':>9}")
    for figure in figures:
        print(figure)


def cost() -> Iterator[Figure]:
    """Median CPU time of scheduling and taking in a decode step, with and without requests that wait for a seat."""
    for count in (16, 64, 256):
        for waiting in (0, 100):
            config = EngineConfig(name="benchmark", max_num_seqs=count)
            engine = Engine(config, IdleRunner(num_blocks=64 * count, token_budget=8192), time.thread_time)
            for index in range(count + waiting):
                engine.add(_request(index, num_prompt_tokens=128, max_tokens=300))
            while engine.stats().running < count or any(r.num_output_tokens == 0 for r in engine.scheduler.running):
                engine.step()
            for _ in range(200):
                engine.step()
            taken = [record["schedule_s"] + record["update_s"] for record in engine.records.last(200)]
            yield Figure(
                "cost",
                f"step of {count} running, {waiting} waiting",
                statistics.median(taken) * 1e6,
                (BAR_STEP_S + BAR_SEQUENCE_S * count) * 1e6,
                "us",
            )


def admission() -> Iterator[Figure]:
    """Preemptions of 500 requests of the workload `mixed`, by how many are in the engine at a time."""
    count = 500
    for seats in (16, 64):
        for concurrency in (seats, 2 * seats, count):
            yield from _preemptions(count, seats, concurrency)
        yield from _preemptions(count, seats, count, pool=0.5)


def _preemptions(count: int, seats: int, concurrency: int, pool: float = 1.0) -> Iterator[Figure]:
    """With a pool of that many times what all seats hold in the end; the bars are for 1."""
    requests = _mixed_requests(count)
    mean = statistics.mean(_blocks(_final_length(request)) for request in requests)
    config = EngineConfig(name="benchmark", max_num_seqs=seats)
    engine = Engine(config, IdleRunner(num_blocks=round(pool * seats * mean)), time.perf_counter)
    to_come = iter(requests)
    _add_next(engine, to_come, concurrency)
    while engine.has_work:
        engine.step()
        _add_next(engine, to_come, concurrency)
    preempted = sum(request.num_preemptions > 0 for request in requests)
    most = max(request.num_preemptions for request in requests)
    ended = sum(request.finish_reason == "stop" for request in requests)
    case = f"{seats} seats, {concurrency} at a time, {'whole' if pool == 1 else f'{pool:g} of the'} pool: "
    judged = pool == 1
    yield Figure("admission", case + "share preempted", preempted / count, BAR_PREEMPTED if judged else None)
    yield Figure("admission", case + "most of one request", most, BAR_MOST_PREEMPTIONS if judged else None)
    yield Figure("admission", case + "share finished", ended / count, 1.0, at_least=True)


def fairness() -> Iterator[Figure]:
    """One tenant's flood beside another's trickle, and two floods beside each other."""
    for weights in ("", "trickle=3", "flood=3"):
        flood = [_for_tenant(request, "flood", 0.0) for request in _mixed_requests(100)]
        trickle = [_for_tenant(request, "trickle", float(i)) for i, request in enumerate(_mixed_requests(200, seed=1))]
        _simulate(weights, [*flood, *trickle], until=lambda flood=flood: all(r.finished for r in flood))
        first = statistics.median(map(_queue_s, flood))
        others = [_queue_s(request) for request in trickle if request.first_scheduled_time is not None]
        case = f"{weights or 'equal weights'}: P99 of trickle's queue / median of flood's ({first:.1f} s)"
        # Where the flood has three quarters of the machine, the trickle asks for more than the rest.
        bar = None if weights == "flood=3" else BAR_QUEUE_RATIO
        yield Figure("fairness", case, float(np.percentile(others, 99)) / first, bar)
    for weights, weight in (("", {"a": 1, "b": 1}), ("a=3", {"a": 3, "b": 1})):
        for name, prompts in (("alike", "mixed"), ("b with prompts of 512", "fixed:512,48")):
            both = [_for_tenant(request, "a", 0.0) for request in _mixed_requests(400)]
            both += [_for_tenant(request, "b", 0.0) for request in _mixed_requests(400, seed=1, workload=prompts)]
            runner, waiting = _simulate(weights, both)
            for tenant in weight:
                share = _least_share(runner, waiting, tenant) / (weight[tenant] / sum(weight.values()))
                case = f"{weights or 'equal weights'}, {name}: least share of {tenant} / its weight's"
                yield Figure("fairness", case, share, BAR_SHARE, at_least=True)


def _simulate(
    weights: str, requests: Sequence[Request], until: Callable[[], bool] = lambda: False
) -> tuple[SimulatedRunner, list[set[str]]]:
    """Serve requests as they arrive; returns for each step also the tenants that had requests waiting after it."""
    runner = SimulatedRunner(num_blocks=1 << 14)
    config = EngineConfig(name="benchmark", queue_order="fair", tenant_weights=weights)
    engine = Engine(config, runner, runner.clock)
    to_come = sorted(requests, key=lambda request: request.arrival_time, reverse=True)
    waiting: list[set[str]] = []
    while (to_come or engine.has_work) and not until():
        if not engine.has_work:
            runner.now = max(runner.now, to_come[-1].arrival_time)
        while to_come and to_come[-1].arrival_time <= runner.now:
            engine.add(to_come.pop())
        engine.step()
        waiting.append({request.tenant for request in engine.scheduler.waiting})
    return runner, waiting


def _least_share(runner: SimulatedRunner, waiting: Sequence[set[str]], tenant: str) -> float:
    """The least share of the computed tokens that a tenant got in any window in which it had requests waiting."""
    ends = [end for end, _ in runner.steps]
    own = [0, *accumulate(tokens[tenant] for _, tokens in runner.steps)]
    total = [0, *accumulate(tokens.total() for _, tokens in runner.steps)]
    shares = []
    last = 0
    for first in range(len(ends)):
        while last < len(ends) and ends[last] < ends[first] + SHARE_WINDOW_S:
            last += 1
        if last == len(ends):
            break
        if all(tenant in waiting[step] for step in range(first, last + 1)):
            # The steps after `first` up to `last`.
            shares.append((own[last + 1] - own[first + 1]) / (total[last + 1] - total[first + 1]))
    return min(shares)


def _add_next(engine: Engine, to_come: Iterator[Request], concurrency: int) -> None:
    """Add requests until that many are in the engine."""
    while len(engine.requests) < concurrency and (request := next(to_come, None)) is not None:
        engine.add(request)


def _mixed_requests(count: int, seed: int = 0, workload: str = "mixed") -> list[Request]:
    """The lengths of a comparison's workload, with prompts that share nothing."""
    return [
        _request(
            seed * count + drawn.index,
            num_prompt_tokens=drawn.input_tokens,
            max_tokens=drawn.max_tokens,
            stop_length=drawn.stop_length,
        )
        for drawn in make_workload(workload, count, seed).requests
    ]


def _request(index: int, num_prompt_tokens: int, max_tokens: int, stop_length: int = 0) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, stop_length=stop_length)
    return Request((b"", index), [index, *range(num_prompt_tokens - 1)], sampling, arrival_time=0.0)


def _for_tenant(request: Request, tenant: str, arrival_time: float) -> Request:
    request.key = (tenant.encode(), request.key[1])
    request.tenant, request.arrival_time = tenant, arrival_time
    return request


def _queue_s(request: Request) -> float:
    assert request.first_scheduled_time is not None
    return request.first_scheduled_time - request.arrival_time


def _final_length(request: Request) -> int:
    return request.num_prompt_tokens + request.sampling.stop_length


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


if __name__ == "__main__":
    main()
