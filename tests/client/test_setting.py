"""What the page says of batchers and machine: only what the results know."""

from __future__ import annotations

from simulated_comparison import comparison
from slipstream_client.report.setting import BATCHERS, batchers, machine
from slipstream_client.report.study import Study


def test_each_batcher_that_ran_is_described_with_its_switches_and_no_other_model_is() -> None:
    data = comparison(("static", "dynamic", "continuous"), ("c4",), count=6)
    plan = data[0]["plan"]["variants"]
    plan[1]["model"] = "somebody_s_model"
    plan[2] |= {"model": "continuous", "switches": {"prefix_cache": "off"}}
    assert batchers(Study(*data)) == [
        ("static", BATCHERS["static"]),
        ("continuous", f"{BATCHERS['continuous']}; with prefix_cache=off"),
    ]
    del data[0]["environment"]["engine"]
    assert batchers(Study(*data)) == []


def test_the_machine_is_named_with_the_requests_of_each_load() -> None:
    data = comparison(("dynamic", "continuous"), ("c1", "c4"), count=6)
    results = data[0]
    results["environment"] |= {"cpu": "Some CPU", "cores": 2, "engine": {"model": "small", "device": "cpu"}}
    for run in results["runs"]:
        run |= {"requests": 6 if run["point"] == "c1" else 12, "rss_bytes": 1}
    assert machine(Study(*data)) == (
        "small on cpu; Some CPU, 2 cores; 6 and 12 requests a run at 1 and 4 clients; "
        "the load generator ran on the same machine. Ratios on another device will differ."
    )
    for run in results["runs"]:
        run |= {"requests": 6, "rss_bytes": None}
    assert machine(Study(*data)) == (
        "small on cpu; load from Some CPU, 2 cores; 6 requests a run. Ratios on another device will differ."
    )
