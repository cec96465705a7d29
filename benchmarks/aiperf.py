"""NVIDIA's AIPerf in a virtual environment of its own: install it, let it load a Triton model, read what it found."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream_client.load.workload import WorkloadRequest
from slipstream_client.server.paths import cache_folder
from slipstream_client.tensors import ModelContract

VERSION = "0.13.0"
# Of one run; most of it is AIPerf's own start, which takes 10 to 30 s.
_TIMEOUT_S = 400.0
# The text alone comes from the template: everything else of a body stands beside it in the input file.
_TEMPLATE = {"payload_template": '{"text_input": {{ text|tojson }}}', "response_field": "text_output"}
# With a concurrency alone, the process that gives out the requests looks for a free place in a loop without a pause,
# which takes a core. At a rate beyond what can be answered it looks so many times a second: a closed loop as well.
_LOOKS_PER_S = 500
# As few processes as few cores can bear: one worker alone falls behind where 16 streams are in step. And nothing is
# measured that is not asked for.
_OPTIONS = "--workers-max 2 --record-processors 1 --ui none --no-gpu-telemetry --no-server-metrics --export-level raw"


@dataclass(frozen=True)
class AiperfRun:
    """What AIPerf exported of one run."""

    summary: dict[str, Any]  # by metric: its unit and statistics
    stats: list[dict[str, Any]]  # the model's own `stats`, of every measured request that was answered
    failures: int

    def value(self, metric: str, statistic: str = "avg") -> float:
        """A statistic of a metric, in the unit that AIPerf has it in."""
        return float(self.summary[metric][statistic])


def install() -> Path:
    """The executable, in an environment that is made in the cache folder where it is not there yet."""
    folder = cache_folder() / "benchmarks" / f"aiperf-{VERSION}"
    executable = folder / "bin" / "aiperf"
    if not executable.is_file():
        print(f"Installing aiperf {VERSION} with what it needs into an environment of its own", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, f"aiperf=={VERSION}"], check=True)
    return executable


def run(
    executable: Path,
    url: str,
    contract: ModelContract,
    requests: Sequence[WorkloadRequest],
    concurrency: int,
    *,
    warm_up: int,
    cache_salt: str,
    tokenizer: Path,
) -> AiperfRun:
    """Send `requests`, of which the first `warm_up` are not measured, in a closed loop to generate_stream.

    The bodies are those that our own generator sends. AIPerf counts tokens by encoding the answers with `tokenizer`.
    """
    with tempfile.TemporaryDirectory(prefix="aiperf-") as folder:
        inputs, artifacts = Path(folder) / "inputs.jsonl", Path(folder) / "artifacts"
        inputs.write_text("".join(json.dumps(_entry(contract, each, cache_salt)) + "\n" for each in requests))
        command = [
            *(str(executable), "profile", "--model", contract.name, "--endpoint-type", "template", "--streaming"),
            *("--url", f"http://{url}/v2/models/{contract.name}/generate_stream"),
            *("--extra-inputs", json.dumps(_TEMPLATE)),
            *("--input-file", str(inputs), "--custom-dataset-type", "single_turn"),
            *("--concurrency", str(concurrency), "--request-count", str(len(requests) - warm_up)),
            *("--request-rate", str(_LOOKS_PER_S), "--arrival-pattern", "constant"),
            *("--warmup-request-count", str(warm_up), "--tokenizer", str(tokenizer)),
            *_OPTIONS.split(),
            *("--artifact-dir", str(artifacts)),
        ]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, cwd=folder)
        if ended.returncode:
            raise RuntimeError(f"aiperf ended with {ended.returncode}:\n{ended.stdout[-3000:]}{ended.stderr[-2000:]}")
        summary = json.loads((artifacts / "profile_export_aiperf.json").read_text())
        lines = (artifacts / "profile_export_raw.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    measured = [record for record in records if record["metadata"]["benchmark_phase"] == "profiling"]
    _check_offered(measured, requests[warm_up:])
    answered = [record for record in measured if not record.get("error")]
    return AiperfRun(summary, [_stats(record) for record in answered], len(measured) - len(answered))


def _entry(contract: ModelContract, request: WorkloadRequest, cache_salt: str) -> dict[str, Any]:
    """A line of the input file."""
    body = contract.json_body(request.text, None, request.sampling() | {"cache_salt": cache_salt}, stream=True)
    return {"text": body.pop("text_input"), "output_length": request.stop_length, "extra": body}


def _check_offered(records: Sequence[dict[str, Any]], requests: Sequence[WorkloadRequest]) -> None:
    """Raise unless exactly these requests were sent: a comparison of other ones would say nothing."""
    sent = sorted(record["payload"]["text_input"] for record in records)
    if sent != sorted(request.text for request in requests):
        raise RuntimeError("aiperf measured other requests than it was given")


def _stats(record: dict[str, Any]) -> dict[str, Any]:
    """What the last event of an answer says."""
    (packet,) = record["responses"][-1]["packets"]
    return json.loads(json.loads(packet["value"])["stats"])
