"""The text form of a Prometheus endpoint, as Triton serves it: one sample a line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_SAMPLE = re.compile(r'^([a-zA-Z_:][\w:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})? (\S+)', re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    """One value; a metric has as many as there are sets of labels."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse_samples(text: str, *prefixes: str) -> Iterator[Sample]:
    """The samples whose names begin with one of the prefixes; what is no sample is left out."""
    for name, labels, value in _SAMPLE.findall(text):
        if name.startswith(prefixes):
            yield Sample(name, dict(_LABEL.findall(labels)), float(value))
