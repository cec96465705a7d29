"""The knees that were found, as marks in the charts and in words."""

from __future__ import annotations

from typing import Any

from slipstream_client.report.formats import short
from slipstream_client.report.plot import Rule
from slipstream_client.report.study import Family, Study

KNEE_NEEDS = 3  # points: fewer have no knee to speak of
_KNEES = {"throughput": "throughput knee", "latency": "latency knee", "slo": "target knee"}


def knee_rules(study: Study, family: Family, kind: str) -> list[Rule]:
    """The knees of one kind that were found, where they lie on this axis."""
    if family.kind != _kind(study, family.workload):
        return []
    tips: dict[float, list[str]] = {}
    styles: dict[float, list[int]] = {}
    for number, variant in enumerate(study.variants):
        found = ((study.results.get("knees") or {}).get(f"{variant}/{family.workload}") or {}).get(kind)
        if found and found["at"] is not None and family.loads[0].at <= found["at"] <= family.loads[-1].at:
            told = f"{_KNEES[kind]} of {variant}: {short(found['at'])} {family.axis} ({found['confidence']})"
            tips.setdefault(found["at"], []).append(told)
            styles.setdefault(found["at"], []).append(number)
    return [
        Rule(at, _KNEES[kind], styles[at][0] if len(styles[at]) == 1 else None, upright=True, tip="\n".join(told))
        for at, told in sorted(tips.items())
    ]


def knee_rows(study: Study) -> list[tuple[str, str, list[str]]]:
    """Variant, workload, and each of the three knees in words."""
    rows = []
    for workload in study.workloads:
        for variant in study.variants:
            found = (study.results.get("knees") or {}).get(f"{variant}/{workload}")
            counts = [len(f.loads) for f in study.families if f.workload == workload]
            if found and max(counts) >= KNEE_NEEDS:
                axis = next(
                    f.axis for f in study.families if (f.workload, f.kind) == (workload, _kind(study, workload))
                )
                rows.append((variant, workload, [_knee_words(found.get(kind), axis) for kind in _KNEES]))
    return rows


def _kind(study: Study, workload: str) -> str:
    """The kind of load that knees of a workload speak of: the one with the most points, closed loops first."""
    families = [family for family in study.families if family.workload == workload]
    return max(families, key=lambda family: len(family.loads)).kind


def _knee_words(knee: dict[str, Any] | None, axis: str) -> str:
    if not knee or knee["at"] is None:
        return f"no knee: {knee['reason']}" if knee else "no knee"
    return f"{short(knee['at'])} {axis}: {knee['confidence']}"
