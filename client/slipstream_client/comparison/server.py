"""The server under test: its models, what it counts, and what its engines tell, as far as it lets a client know."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream_client.admin import AdminClient
from slipstream_client.comparison.engine_metrics import EngineWatch
from slipstream_client.comparison.resources import ProcessWatch
from slipstream_client.comparison.variants import Variant
from slipstream_client.server.triton_http import TritonHttp
from slipstream_client.tensors import ModelContract, RequestFailed

_LOAD_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class ServerUnderTest:
    """Of the variants that have no server of their own."""

    grpc_url: str
    http_url: str | None
    contracts: Mapping[str, ModelContract]  # of every variant's model, by the name that it is served by
    metrics_url: str | None  # None: what the engine counts stays unknown
    process_ids: Callable[[], list[int]] | None  # None: not a server of ours, so its resources stay unknown
    repository: Path | None = None  # that of a server of ours, where its models' configurations can be changed

    def contract(self, variant: Variant) -> ModelContract | None:
        """What its model takes; None where another server has it."""
        return None if variant.url is not None else self.contracts[variant.served_name]

    def url_of(self, variant: Variant) -> str:
        """Where its requests are sent."""
        if variant.url is not None:
            return variant.url
        if variant.target == "grpc":
            return self.grpc_url
        if self.http_url is None:
            raise RequestFailed(f"{variant.name} is asked over HTTP: where is not known", "INVALID_ARGUMENT")
        return self.http_url

    def load(self, variant: Variant) -> None:
        """Let the server read a model's configuration again."""
        assert self.http_url is not None
        TritonHttp(self.http_url).load(variant.served_name, _LOAD_TIMEOUT_S)

    def engine_watch(self, variant: Variant) -> EngineWatch | None:
        """Counts what one run of a variant adds."""
        own = self.contract(variant)
        return EngineWatch(self.metrics_url, own.engine, own.name) if own and self.metrics_url else None

    def process_watch(self, variant: Variant) -> ProcessWatch | None:
        """Measures what one run of a variant takes of the machine."""
        own = self.contract(variant)
        if own is None or self.process_ids is None:
            return None
        others = {name for contract in self.contracts.values() for name in (contract.name, contract.engine)}
        return ProcessWatch(self.process_ids, others - {own.name, own.engine})

    def context(self, variant: Variant) -> int | None:
        """The most tokens of a prompt and its answer together; None where the server's model `admin` does not tell."""
        own = self.contract(variant)
        if own is None:
            return None
        with AdminClient(self.grpc_url) as admin, contextlib.suppress(RequestFailed):
            return int(admin.status(own.engine)["max_model_len"])
        return None

    def step_watch(self, variant: Variant) -> StepWatch | None:
        """Keeps the steps of one run; None where the server's model `admin` does not tell."""
        own = self.contract(variant)
        if own is None:
            return None
        admin = AdminClient(self.grpc_url)
        try:
            return StepWatch(admin, own.engine)
        except RequestFailed:
            admin.close()
            return None


class StepWatch:
    """An engine's step records from now on, and where its clock stands."""

    def __init__(self, admin: AdminClient, engine: str) -> None:
        self._admin = admin
        self._engine = engine
        self._first = admin.status(engine)["steps"]
        self._offset_s = admin.clock_offset_s(engine)

    def clock_offset_s(self, start_s: float) -> float:
        """The engine's clock less that of a run whose time zero was at `time.perf_counter()` = `start_s`."""
        return self._offset_s + start_s

    def stop(self, start_s: float) -> Sequence[Mapping[str, Any]]:
        """The steps since then, in the run's clock, and the end of the connection.

        Raises:
            RequestFailed: the engine does not answer any more.
        """
        with self._admin as admin:
            records = list(admin.records(self._engine, self._first))
        offset_s = self.clock_offset_s(start_s)
        return [record | {"start_s": round(record["start_s"] - offset_s, 6)} for record in records]

    def missing(self, steps: Sequence[Mapping[str, Any]]) -> int:
        """How many of the first ones the engine had dropped before they were asked for."""
        return steps[0]["index"] - self._first if steps else 0
