"""How many streamed chunks a second one process on one core takes in: `python -m benchmarks.generator [--json]`.

A server in another process, on another core, sends each answer as 64 chunks, one every 50 ms. For each rate so many
clients run that this is it, and the lag gate says whether the generator kept up; where it did not, part of what it
measures is itself. Steady: streams are out of step, as those of several engines are. Bursts: all are in step, as those
of one engine, which sends a chunk of every sequence at the end of a step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import model_config_pb2, service_pb2

from slipstream_client.comparison.request_figures import ttft_ms
from slipstream_client.load.arrivals import ClosedLoop
from slipstream_client.load.generator import LoadOptions, LoadReport, run_load
from slipstream_client.load.lag import too_late
from slipstream_client.load.records import RequestRecord
from slipstream_client.load.targets import make_target
from slipstream_client.load.workload import make_workload

BAR = 2000  # chunks a second
_CHUNKS, _PACE_S, _ROUNDS = 64, 0.05, 4
_INPUTS = "text_input sampling_parameters stream cancel return_finish_reason return_num_input_tokens"
_INPUTS += " return_num_output_tokens return_stats"


def main() -> None:
    """Run the benchmark and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rates", default="500,1000,2000,3000,4000", help="comma-separated chunks a second")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    results = []
    for bursts in (False, True):
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.Process(target=serve, args=(theirs, cores[-1], bursts), daemon=True)
        process.start()
        os.sched_setaffinity(0, cores[:1])
        url = ours.recv()
        results += [measure(url, ours, rate, bursts) for rate in map(int, arguments.rates.split(","))]
        process.kill()
        process.join()
        os.sched_setaffinity(0, cores)
    if arguments.json:
        print(json.dumps({"version": 1, "bar": BAR, "cores": len(cores), "points": results}, indent=1))
        return
    head = (
        f"{'streams':>7} {'offered/s':>9} {'received/s':>10} {'CPU':>5} {'us/chunk':>8} {'lag P99 ms':>10} {'max':>6}"
    )
    print(f"{head} {'server late P99 ms':>18}  gate")
    for r in results:
        print(
            f"{r['streams']:7d} {r['offered_per_s']:9.0f} {r['received_per_s']:10.0f} {r['cpu']:5.0%} "
            f"{r['us_per_chunk']:8.0f} {r['lag_ms']['p99']:10.1f} {r['lag_ms']['max']:6.1f} "
            f"{r['server_late_p99_ms']:18.1f}  {'bursts: ' if r['bursts'] else 'steady: '}{r['invalid'] or 'passed'}"
        )
    for bursts in (False, True):
        passed = [r["received_per_s"] for r in results if r["bursts"] == bursts and not r["invalid"]]
        print(f"{'bursts' if bursts else 'steady'}: {max(passed, default=0):.0f} chunks/s, where {BAR} are asked for")


def measure(url: str, server: Connection, rate: int, bursts: bool) -> dict[str, Any]:
    """One run that has `rate` chunks a second between the last client's joining and the first's leaving."""
    streams = max(1, round(rate * _PACE_S))
    answer_s = _CHUNKS * _PACE_S
    first, last = answer_s, answer_s * (_ROUNDS - 1)
    records: list[RequestRecord] = []
    busy: list[float] = []  # processor seconds of this process at the beginning and the end of that time

    async def load() -> LoadReport:
        async with make_target("grpc", url, "scripted") as target:
            requests = make_workload(f"fixed:32,{_CHUNKS}", streams * _ROUNDS).requests
            clients = ClosedLoop(streams, ramp_up_s=answer_s)
            for at in (first, last):
                asyncio.get_running_loop().call_later(at, lambda: busy.append(time.process_time()))
            return await run_load(target, requests, LoadOptions("benchmark", clients), records)

    report = asyncio.run(load())
    assert not [record.error for record in records if record.error]
    chunks = sum(first <= at < last for record in records for at, _ in record.chunks)
    server.send(None)
    median_ms = statistics.median(value for record in records if (value := ttft_ms(record)) is not None)
    return {
        "bursts": bursts,
        "streams": streams,
        "offered_per_s": streams / _PACE_S,
        "received_per_s": chunks / (last - first),
        "cpu": (busy[1] - busy[0]) / (last - first),
        "us_per_chunk": (busy[1] - busy[0]) / chunks * 1e6,
        "lag_ms": report.lag.worst(),
        "invalid": too_late(report.lag, median_ms),
        "server_late_p99_ms": server.recv(),
    }


def serve(pipe: Connection, core: int, bursts: bool) -> None:
    """A server that says its address, and for every message how late its chunks were since the last one."""
    os.sched_setaffinity(0, {core})
    asyncio.run(_Server(pipe, bursts).run())


class _Server:
    def __init__(self, pipe: Connection, bursts: bool) -> None:
        self._pipe = pipe
        self._bursts = bursts
        self._streams = 0
        self._late: list[float] = []

    async def run(self) -> None:
        server = grpc.aio.server()
        methods = {
            "ModelConfig": grpc.unary_unary_rpc_method_handler(self._config),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._stream),
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("inference.GRPCInferenceService", methods),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._tell)
        self._pipe.send(f"127.0.0.1:{port}")
        await server.wait_for_termination()

    def _tell(self) -> None:
        self._pipe.recv()
        self._pipe.send(float(np.percentile(self._late, 99)) * 1000)
        self._late.clear()

    async def _config(self, request: bytes, context: Any) -> bytes:
        config = model_config_pb2.ModelConfig(name="scripted")
        config.model_transaction_policy.decoupled = True
        for name in _INPUTS.split():
            config.input.add(name=name)
        return service_pb2.ModelConfigResponse(config=config).SerializeToString()

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            break
        self._streams += 1
        now = time.perf_counter()
        # Out of step by the golden ratio: however many there are, their phases are spread evenly.
        start = now + (-now % _PACE_S if self._bursts else self._streams * 0.618034 % 1 * _PACE_S)
        for at in range(_CHUNKS):
            due = start + at * _PACE_S
            await asyncio.sleep(due - time.perf_counter())
            self._late.append(time.perf_counter() - due)
            yield _LAST if at == _CHUNKS - 1 else _CHUNK


def _chunk(*, last: bool) -> bytes:
    """As the continuous model says one token."""
    response = service_pb2.ModelInferResponse(model_name="scripted", id="benchmark/00000")
    response.parameters["triton_final_response"].bool_param = last
    stats = b'{"queue_ms": 12.5, "first_token_ms": 50.0, "inference_ms": 3200.0}'
    texts = {"text_output": b" word", "finish_reason": b"stop" if last else b"", "stats": stats if last else b""}
    for name, text in texts.items():
        response.outputs.add(name=name, datatype="BYTES", shape=[1])
        response.raw_output_contents.append(len(text).to_bytes(4, "little") + text)
    for name, value in {"num_input_tokens": 32, "num_output_tokens": 1}.items():
        response.outputs.add(name=name, datatype="UINT32", shape=[1])
        response.raw_output_contents.append(value.to_bytes(4, "little"))
    return service_pb2.ModelStreamInferResponse(infer_response=response).SerializeToString()


_CHUNK, _LAST = _chunk(last=False), _chunk(last=True)

if __name__ == "__main__":
    main()
