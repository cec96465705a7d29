"""A device that has no memory for a step gets smaller ones; only what it has no memory for alone fails."""

from __future__ import annotations

import pytest

from observed import ObservedEngine
from scripted import ScriptedRunner, make_config, make_request


def run(runner: ScriptedRunner, **fields: object) -> ObservedEngine:
    observed = ObservedEngine(make_config(max_num_seqs=4, **fields), runner)
    for number in range(4):
        observed.add(make_request(2 * number, 30, 10, n=2, ignore_eos=True, prompt_logprobs=0, logprobs=0))
    observed.run()
    return observed


def test_a_step_without_memory_is_computed_in_parts_and_later_ones_are_smaller() -> None:
    runner = ScriptedRunner(64, token_budget=100, most_tokens=20)
    observed = run(runner)
    observed.check_end()
    assert set(observed.reasons.values()) == {"length"}
    # The first step has 100 tokens: halved, and the halves again and again; no later one is as large.
    assert [batch.num_tokens for batch in runner.batches[:8]] == [12, 13, 12, 13, 12, 13, 12, 13]
    assert max(batch.num_tokens for batch in runner.batches[8:]) <= 20
    assert observed.engine.stats().steps > 8


def test_each_sequence_keeps_its_token_of_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    """Without memory for even those, each step is halved; the log tells of a size once."""
    observed = run(ScriptedRunner(64, token_budget=100, most_tokens=1))
    observed.check_end()
    assert set(observed.reasons.values()) == {"length"}
    rows = [record["prefill_rows"] + record["decode_rows"] for record in observed.records]
    assert rows[0] == 100
    assert max(rows[1:]) == 4
    sizes = [record.args[0] for record in caplog.records]
    assert sizes == [100, 50, 25, 12, 6, 3, 2]


def test_whole_prompts_stay_whole_without_chunked_prefill() -> None:
    observed = run(ScriptedRunner(64, token_budget=100, most_tokens=20), chunked_prefill=False)
    observed.check_end()
    assert set(observed.reasons.values()) == {"length"}


def test_what_has_no_memory_alone_fails_and_the_engine_goes_on() -> None:
    runner = ScriptedRunner(64, most_tokens=0)
    observed = ObservedEngine(make_config(), runner)
    observed.add(make_request(0, 30, 10))
    observed.run()
    failed = observed.requests[(b"door", 0)]
    assert failed.error == "the step that computed it failed: OutOfMemory: 1 tokens"
    runner._most_tokens = None
    observed.add(make_request(1, 30, 10))
    observed.run()
    assert observed.reasons[(b"door", 1)] in ("stop", "length")
