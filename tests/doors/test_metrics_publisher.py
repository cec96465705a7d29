"""The publisher of metrics, over a Triton whose metrics refuse what the test wants refused."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from deadline import wait_until
from slipstream.engine.latencies import FIRST_TOKEN_EDGES
from slipstream.engine.messages import EngineStats


@dataclass
class ScriptedMetrics:
    """What of `triton_python_backend_utils` a publisher uses; a counter refuses to fall, as Triton's does."""

    values: dict[str, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def module(self) -> Any:
        return SimpleNamespace(
            MetricFamily=self._make_family_kind(), Logger=SimpleNamespace(log_error=self.errors.append)
        )

    def _make_family_kind(self) -> Any:
        values = self.values

        class Metric:
            def __init__(self, name: str) -> None:
                self._name = name

            def set(self, value: float) -> None:
                values[self._name] = value

            def increment(self, value: float) -> None:
                if value < 0:
                    raise RuntimeError("a counter can only be incremented by non-negative values")
                values[self._name] = values.get(self._name, 0) + value

        class MetricFamily:
            COUNTER, GAUGE = "counter", "gauge"

            def __init__(self, name: str, description: str, kind: str) -> None:
                self._name = name

            def Metric(self, labels: dict[str, str]) -> Metric:
                return Metric(self._name + "".join(labels.get(name, "") for name in ("reason", "le")))

        return MetricFamily


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedMetrics]:
    scripted = ScriptedMetrics()
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", scripted.module())
    monkeypatch.delitem(sys.modules, "slipstream.doors.metrics", raising=False)
    yield scripted
    sys.modules.pop("slipstream.doors.metrics", None)


def stats(**fields: Any) -> EngineStats:
    return EngineStats(kv_blocks_total=8, **fields)


@pytest.mark.parametrize("closed", [False, True])
def test_a_counter_that_would_fall_stays_and_all_others_go_on(scripted: ScriptedMetrics, closed: bool) -> None:
    """ENG-06: an engine that counts wrongly costs one metric its change, never the thread that publishes, or a door."""
    publisher = importlib.import_module("slipstream.doors.metrics").MetricsPublisher({"model": "m"})
    values = scripted.values
    for step, (prompt_tokens, hit_tokens) in enumerate([(5, 4), (7, 3), (9, 6)], start=1):
        publisher.publish(stats(prompt_tokens=prompt_tokens, prefix_hit_tokens=hit_tokens, steps=step, running=step))
        # In this order: counters before gauges.
        gauge, value = ("steps_total", step) if closed and step > 1 else ("requests_running", step)
        wait_until(lambda: values.get(f"slipstream_{gauge}") == value, f"report {step} is published")  # noqa: B023
        assert values["slipstream_prompt_tokens_total"] == prompt_tokens
        assert values["slipstream_prefix_cache_hits_total"] == [4, 4, 4 + 3][step - 1]
        if closed and step == 1:
            publisher.close()
    publisher.close()
    assert scripted.errors == [
        "metric slipstream_prefix_cache_hits_total was not changed: "
        "a counter can only be incremented by non-negative values"
    ]
    assert (values["slipstream_requests_running"], values["slipstream_engine_up"]) == (0, 0)


def test_a_histogram_is_published_as_buckets_that_hold_those_before_them(scripted: ScriptedMetrics) -> None:
    publisher = importlib.import_module("slipstream.doors.metrics").MetricsPublisher({"model": "m"})
    values, name = scripted.values, "slipstream_time_to_first_token_seconds"
    first = stats(steps=1)
    for seconds in (0.03, 0.3, 1000.0):
        first.first_token.observe(seconds, FIRST_TOKEN_EDGES)
    second = stats(steps=2)
    for seconds in (0.03, 0.3, 1000.0, 0.3):
        second.first_token.observe(seconds, FIRST_TOKEN_EDGES)
    publisher.publish(first)
    wait_until(lambda: values.get("slipstream_engine_up") == 1, "the first report is published")
    assert {edge: values[f"{name}_bucket{edge}"] for edge in ("0.02", "0.04", "0.25", "0.5", "640.0", "+Inf")} == {
        "0.02": 0,
        "0.04": 1,
        "0.25": 1,
        "0.5": 2,
        "640.0": 2,
        "+Inf": 3,
    }
    publisher.publish(second)
    publisher.close()
    assert (values[f"{name}_bucket0.04"], values[f"{name}_bucket0.5"], values[f"{name}_count"]) == (1, 3, 4)
    assert values[f"{name}_sum"] == pytest.approx(1000.63)
    assert values["slipstream_inter_token_latency_seconds_count"] == 0


def test_refusals_are_published_by_reason(scripted: ScriptedMetrics) -> None:
    publisher = importlib.import_module("slipstream.doors.metrics").MetricsPublisher({"model": "m"})
    publisher.publish(stats(refused={"unavailable": 2}))
    publisher.close()
    publisher.publish(stats(refused={"unavailable": 5, "invalid": 1}))
    assert scripted.values["slipstream_requests_refused_totalunavailable"] == 5
    assert scripted.values["slipstream_requests_refused_totalinvalid"] == 1
