"""The continuous scheduler under random arrivals, lengths, cancels, failures and pool sizes.

After every step: invariants, budgets, fairness and order. At the end: every request has ended exactly once, with the
tokens of its undisturbed run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from observed import ObservedEngine
from scripted import BLOCK_SIZE, DOOR, VOCAB_SIZE, ScriptedRunner, make_config, make_prompt, make_request
from slipstream.config import EngineConfig
from slipstream.engine.batch import Batch
from slipstream.engine.request import FINISH_LENGTH, Request
from slipstream.errors import InvalidRequest, Unavailable

# Request number i of a scenario has the key i * _MOST_CHOICES; its further choices have the keys after it.
_MOST_CHOICES = 4


@dataclass(frozen=True)
class Arrival:
    """One request and the step before which it comes."""

    step: int
    prompt: int
    max_tokens: int
    stop_length: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    family: int = -1  # requests of one family have prompts that begin alike; -1 is the only one of its kind
    salt: str = ""
    priority: int = 0
    tenant: str = ""
    n: int = 1
    timeout: float = math.inf  # on the scripted clock, which moves a few milliseconds a step


@dataclass(frozen=True)
class Scenario:
    """A server's size, its requests, and what goes wrong."""

    num_blocks: int
    seats: int
    spare_budget: int  # tokens of the budget beyond one a seat
    admission: str
    chunked_prefill: bool
    arrivals: list[Arrival]
    cancels: list[tuple[int, int]] = field(default_factory=list)  # (step, key)
    failing_steps: frozenset[int] = frozenset()
    not_finite: frozenset[tuple[int, int]] = frozenset()  # (key, output index)
    most_tokens: int | None = None  # of one step, for which there is memory
    max_queued_requests: int = 100
    max_queued_tokens: int = 10_000
    prefix_cache: bool = True
    queue_order: str = "fcfs"
    look_past: int = 0
    long_prefill_token_threshold: int = 0

    def config(self) -> EngineConfig:
        return make_config(
            max_num_seqs=self.seats,
            admission=self.admission,
            chunked_prefill=self.chunked_prefill,
            max_queued_requests=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
            prefix_cache=self.prefix_cache,
            queue_order=self.queue_order,
            tenant_weights="heavy=3",
            look_past=self.look_past,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
        )

    def runner(self) -> ScriptedRunner:
        return ScriptedRunner(
            self.num_blocks,
            token_budget=self.seats + self.spare_budget,
            max_model_len=96,
            failing_steps=self.failing_steps,
            not_finite={((DOOR, key), index) for key, index in self.not_finite},
            most_tokens=self.most_tokens,
        )


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """The engine logs every failed step with its traceback; here hundreds fail on purpose."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


arrivals = st.builds(
    Arrival,
    step=st.integers(0, 30),
    prompt=st.integers(1, 60),
    max_tokens=st.integers(1, 60),
    stop_length=st.one_of(st.just(0), st.integers(1, 60)),
    ignore_eos=st.booleans(),
    stop_token_ids=st.one_of(st.just(()), st.tuples(st.integers(0, VOCAB_SIZE - 1))),
    family=st.integers(-1, 1),
    salt=st.sampled_from(["", "", "", "salt"]),
    priority=st.integers(-2, 2),
    tenant=st.sampled_from(["", "light", "heavy"]),
    n=st.sampled_from([1, 1, 1, 2, _MOST_CHOICES]),
)
hurried_arrivals = st.builds(replace, arrivals, timeout=st.one_of(st.just(math.inf), st.floats(0.001, 0.2)))
scenarios = st.builds(
    Scenario,
    num_blocks=st.integers(1, 16),
    seats=st.integers(1, 6),
    spare_budget=st.one_of(st.integers(0, 8), st.integers(9, 60)),
    admission=st.sampled_from(["optimistic", "no_evict"]),
    chunked_prefill=st.booleans(),
    arrivals=st.lists(arrivals, min_size=1, max_size=12),
    queue_order=st.sampled_from(["fcfs", "priority", "fair"]),
    look_past=st.integers(0, 3),
    long_prefill_token_threshold=st.sampled_from([0, 1, 7]),
    most_tokens=st.sampled_from([None, None, 1, 3, 16]),
)
troubled_scenarios = st.builds(
    Scenario,
    num_blocks=st.integers(1, 16),
    seats=st.integers(1, 6),
    spare_budget=st.integers(0, 40),
    admission=st.sampled_from(["optimistic", "no_evict"]),
    chunked_prefill=st.booleans(),
    arrivals=st.lists(hurried_arrivals, min_size=1, max_size=12),
    cancels=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12 * _MOST_CHOICES - 1)), max_size=12),
    failing_steps=st.frozensets(st.integers(0, 60), max_size=3),
    not_finite=st.frozensets(st.tuples(st.integers(0, 12 * _MOST_CHOICES - 1), st.integers(0, 20)), max_size=8),
    max_queued_requests=st.integers(1, 12),
    max_queued_tokens=st.integers(1, 200),
    prefix_cache=st.booleans(),
    queue_order=st.sampled_from(["fcfs", "priority", "fair"]),
    look_past=st.integers(0, 3),
)


class ObservedScheduler:
    """Stands between the engine and its continuous scheduler and checks each decision as it is taken."""

    def __init__(self, observed: ObservedEngine, scenario: Scenario) -> None:
        self._scheduler = observed.scheduler
        self._budget = observed.runner.token_budget
        self._seats = scenario.seats
        self._prefix_cache = scenario.prefix_cache
        self._no_evict = scenario.admission == "no_evict"
        self._scenario = scenario
        self._longest_chunk = scenario.chunked_prefill and scenario.long_prefill_token_threshold
        self._schedule = observed.scheduler.schedule
        observed.scheduler.schedule = self.schedule

    def schedule(self, now: float) -> Batch:
        scheduler = self._scheduler
        everyone = (*scheduler.running, *scheduler.waiting, *held_back(scheduler))
        expired = [request for request in everyone if now > request.deadline]
        running = [request for request in scheduler.running if request not in expired]
        waiting = [request for request in scheduler.waiting if request not in expired]
        preemptions = scheduler.num_preemptions
        batch = self._schedule(now)
        assert all(request.finished and not request.block_table for request in expired)
        assert not any(request in scheduler.running or request in scheduler.waiting for request in expired)

        victims = [request for request in running if request in scheduler.waiting]
        admitted = [request for request in scheduler.running if request not in running]
        outgrown = [request for request in scheduler.running if request.finished]
        chunks = {chunk.request: chunk for chunk in batch.chunks}

        assert batch.num_tokens <= self._budget
        assert batch.num_useful_tokens == batch.num_tokens
        assert len(scheduler.running) <= self._seats
        assert len(chunks) == len(batch.chunks), "a sequence has two chunks in one step"
        assert set(chunks) == set(scheduler.running) - set(outgrown), "a running sequence got nothing"
        assert batch.chunks or outgrown or expired, "the step brings nothing forward"

        assert scheduler.num_preemptions - preemptions == len(victims)
        self._check_order(running, waiting, victims, admitted)
        assert len(outgrown) <= 1
        for request in outgrown:
            assert running == [request]
            assert request.finish_reason == FINISH_LENGTH

        for request in scheduler.waiting:
            assert request.block_table == []
            assert request.num_computed == 0
        for request, chunk in chunks.items():
            end = chunk.start + chunk.num_tokens
            assert chunk.start == request.num_computed
            assert request in running or request.choice or chunk.start % BLOCK_SIZE == 0
            assert request in running or request.choice or self._prefix_cache or chunk.start == 0
            assert chunk.num_tokens >= 1
            assert not self._longest_chunk or chunk.num_tokens <= self._longest_chunk
            assert chunk.token_ids == request.token_ids[chunk.start : end]
            assert chunk.sample == (end == request.num_tokens)
            assert len(request.block_table) == scheduler.pool.blocks_for(end), "blocks are not taken on demand"
            written = request.block_table[chunk.start // BLOCK_SIZE :]
            assert scheduler.pool.num_exclusive(written) == len(written), "what others read is written"
        return batch

    def _check_order(
        self, running: list[Request], waiting: list[Request], victims: list[Request], admitted: list[Request]
    ) -> None:
        """Who had to go, and who came in their place or in that of others."""
        order, still_running = self._scenario.queue_order, self._scheduler.running
        if order != "priority":
            assert victims == running[len(running) - len(victims) :], "the victims are not the newest"
            assert not (self._no_evict and victims)
            assert not (victims and admitted), "admitted in a step that preempted"
            assert not running or still_running[0] is running[0], "the oldest was a victim"
        elif running:
            oldest = min(running, key=lambda request: request.priority)
            assert oldest in still_running or any(r.priority < oldest.priority for r in admitted)
            for victim in victims:
                assert not any(r.priority > victim.priority for r in still_running if r in running), (
                    "not the least urgent"
                )
        if order == "fcfs" and not self._scenario.look_past:
            # Behind none but further choices of a request that came before them.
            line = [request for request in self._scheduler.waiting if request in victims or not request.choice]
            assert line[: len(victims)] == sorted(victims, key=lambda r: r.rank), "the victims are not at the head"
        if not self._scenario.look_past and order != "fair":
            assert admitted == waiting[: len(admitted)], "the queue was jumped"
        assert all(request.num_passed <= self._scenario.look_past for request in (*waiting, *running))


def held_back(scheduler: Any) -> list[Request]:
    """Further choices that wait for their first to have computed the prompt."""
    return [choice for choices in scheduler._held_back.values() for choice in choices]


def play(scenario: Scenario) -> ObservedEngine:
    """Run a scenario to its end under observation."""
    observed = ObservedEngine(scenario.config(), scenario.runner())
    ObservedScheduler(observed, scenario)
    pending = sorted(enumerate(scenario.arrivals), key=lambda item: item[1].step)
    cancels = sorted(scenario.cancels)
    step = 0
    while pending or observed.engine.has_work:
        while pending and pending[0][1].step <= step:
            number, arrival = pending.pop(0)
            submit(observed, scenario, number, arrival)
        observed.cancel(*[number for at, number in cancels if at == step])
        if observed.engine.has_work:
            observed.step()
        assert step < 3000, "the engine does not come to an end"
        step += 1
    observed.check_end()
    return observed


def submit(observed: ObservedEngine, scenario: Scenario, number: int, arrival: Arrival) -> None:
    """Add one request; it is refused exactly when the contract says so."""
    request = make_request(
        number * _MOST_CHOICES,
        make_prompt(arrival.prompt, number if arrival.family < 0 else 100 + arrival.family),
        arrival.max_tokens,
        stop_length=arrival.stop_length,
        ignore_eos=arrival.ignore_eos,
        stop_token_ids=arrival.stop_token_ids,
        seed=number,
        n=arrival.n,
        logprobs=number % 3 or None,
        prompt_logprobs=1 if number % 4 == 3 else None,
    )
    request.cache_salt = arrival.salt
    request.priority, request.tenant = arrival.priority, arrival.tenant
    request.arrival_time = observed.engine._clock()
    request.deadline = request.arrival_time + arrival.timeout
    scheduler: Any = observed.scheduler
    longest = arrival.prompt + arrival.max_tokens
    needed = longest if scenario.admission == "no_evict" else arrival.prompt + 1
    waiting = (*scheduler.waiting, *held_back(scheduler))
    queued = sum(request.num_tokens for request in waiting)
    never = (
        longest > observed.runner.max_model_len
        or needed > scenario.num_blocks * BLOCK_SIZE
        or (not scenario.chunked_prefill and arrival.prompt > observed.runner.token_budget)
    )
    free_seats = scenario.seats - len(scheduler.running)
    not_now = len(waiting) - free_seats >= scenario.max_queued_requests or (
        len(waiting) > 0 and queued + arrival.prompt * arrival.n > scenario.max_queued_tokens
    )
    refusal = observed.add(request)
    assert isinstance(refusal, InvalidRequest) == never
    assert isinstance(refusal, Unavailable) == (not_now and not never)


@settings(max_examples=200)
@given(scenarios)
@example(
    Scenario(
        num_blocks=4,
        seats=4,
        spare_budget=4,
        admission="optimistic",
        chunked_prefill=False,
        arrivals=[Arrival(0, 1, 40, ignore_eos=True)] * 3,
    )
)
def test_every_request_gets_the_tokens_of_its_undisturbed_run(scenario: Scenario) -> None:
    observed = play(scenario)
    assert set(observed.reasons.values()) <= {"stop", "length"}


@settings(max_examples=200)
@given(troubled_scenarios)
def test_cancels_failed_steps_and_broken_logits_take_nobody_else_with_them(scenario: Scenario) -> None:
    observed = play(scenario)
    failed_steps = [step for step in scenario.failing_steps if step < len(observed.runner.batches)]
    hit = {chunk.request.key for step in failed_steps for chunk in observed.runner.batches[step].chunks}
    for key, reason in observed.reasons.items():
        if reason == "error":
            index = len(observed.delivered[key])
            late = "deadline: still in the queue" in str(observed.requests[key].error)
            assert key in hit or (key[1], index) in scenario.not_finite or late
        if reason == "timeout" or (reason == "error" and "deadline" in str(observed.requests[key].error)):
            request = observed.requests[key]
            assert request.finish_time > request.deadline
            assert (reason == "timeout") == ((request.first or request).first_scheduled_time is not None)
        if reason == "cancelled":
            assert any(number == key[1] for _, number in scenario.cancels)
    for key in hit:
        assert observed.reasons[key] == "error"


def test_random_scenarios_do_hit_the_prefix_cache() -> None:
    """What the properties above would not notice: a cache that never finds anything."""
    arrivals = [Arrival(step, 40, 5, family=0) for step in (0, 3, 6)]
    stats = play(Scenario(12, 2, 40, "optimistic", True, arrivals)).engine.stats()
    assert stats.prefix_hit_tokens == 2 * 32


def crowded(prompt: int, max_tokens: int) -> Scenario:
    arrivals = [Arrival(0, prompt, max_tokens, ignore_eos=True) for _ in range(4)]
    return Scenario(6, 4, 12, "optimistic", True, arrivals)


@settings(max_examples=60)
@given(prompt=st.integers(1, 20), max_tokens=st.integers(12, 40))
def test_a_pool_too_small_for_all_preempts_and_still_serves_everyone(prompt: int, max_tokens: int) -> None:
    """The same as the general property, where preemption is certain rather than likely."""
    observed = play(crowded(prompt, max_tokens))
    assert set(observed.reasons.values()) == {"length"}


def test_the_crowded_pool_does_preempt() -> None:
    assert play(crowded(1, 40)).engine.stats().preemptions > 0
