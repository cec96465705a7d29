"""A soak run: thousands of mixed requests at a real server whose KV pool is far too small, then rest.

    PYTHONPATH=tests/soak:tests/server python -m soak --requests 2000 --seconds 600

One server for each queue order that knows more than one kind of user. At the end every request has been answered once
and as when it was asked alone, nothing is held any more, and no process has grown. The servers are killed and not
stopped: Triton (24.10) waits for ever for a request whose stream was cancelled right behind its last response.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil
from tokenizers import Tokenizer

from helpers import PROMPTS, ask, make_server
from observing import GAUGES_AT_REST, Metrics, engine_status, wait_until_at_rest
from slipstream.models.store import resolve
from slipstream_client.server.stubs import living_stubs
from slipstream_client.server.tritonserver import TritonServer
from soak_report import Ended, Idle, Report
from soak_requests import FEW, KINDS, LONGEST, TENANTS, Site, SoakRequest, ask_alone, make_requests

MODELS = ("continuous", "continuous_unary")
QUEUE_ORDERS = ("priority", "fair")
SEATS = 16
BLOCK_SIZE = 16
# Of the model smollm2-135m in fp32: 30 layers, keys and values, 3 heads of 64.
KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 2
# glibc's own thresholds, which it otherwise raises as it goes, and few arenas: so it gives back at once what a step has
# freed, and what is resident at rest is what is held (man 3 mallopt).
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "2"}


def main() -> None:
    """Run, print what was seen, and exit with 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=600.0, help="over which the requests are spread")
    parser.add_argument("--orders", default=",".join(QUEUE_ORDERS), help="queue orders, with commas between")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    orders = arguments.orders.split(",")
    failed = False
    for order in orders:
        report = soak(order, arguments.requests // len(orders), arguments.seconds / len(orders), seed=arguments.seed)
        print(report.table(), end="\n\n", flush=True)
        failed |= bool(report.failures)
    sys.exit(failed)


def soak(
    queue_order: str,
    count: int,
    seconds: float,
    *,
    streams: int = 4 * SEATS,
    seed: int = 0,
    prompts: Sequence[str] = PROMPTS,
) -> Report:
    """Start a server, put it through `count` requests spread over `seconds`, and say how it fared.

    They come in bursts of `streams` at a time.
    """
    tokenizer = Tokenizer.from_file(str(resolve("smollm2-135m") / "tokenizer.json"))
    requests = make_requests(count, seed, prompts)
    num_blocks = _a_third_of_the_demand({prompt: len(tokenizer.encode(prompt).ids) for prompt in prompts}, requests)
    server = make_server(
        *MODELS,
        SLIPSTREAM_QUEUE_ORDER=queue_order,
        SLIPSTREAM_TENANT_WEIGHTS=f"{TENANTS[0]}=3",
        SLIPSTREAM_AGING_SECONDS="5",
        SLIPSTREAM_MAX_NUM_SEQS=str(SEATS),
        SLIPSTREAM_KV_CACHE_BYTES=str(num_blocks * BLOCK_SIZE * KV_BYTES_PER_TOKEN),
        **_MALLOC,
    )
    server.start()
    try:
        site = Site(server, ask_alone(server, prompts), tokenizer.decode)
        _warm_up(server, prompts[0])
        begin, half = time.monotonic(), count // 2
        at_start = _at_rest(server)
        ended = _send_all(site, requests[:half], seconds / 2, streams)
        at_half = _at_rest(server)
        ended += _send_all(site, requests[half:], seconds / 2, streams)
        at_end = _at_rest(server)
        assert at_end.blocks_total == num_blocks
        return Report(queue_order, count, time.monotonic() - begin, ended, at_start, at_half, at_end)
    finally:
        server.kill()


def _a_third_of_the_demand(prompt_tokens: dict[str, int], requests: Sequence[SoakRequest]) -> int:
    """Blocks: a third of what all seats hold when their requests end, and enough for the longest alone."""

    def blocks(num_tokens: int) -> int:
        return -(-num_tokens // BLOCK_SIZE)

    mean = sum(blocks(prompt_tokens[request.prompt] + request.length) for request in requests) / len(requests)
    return max(round(SEATS * mean / 3), blocks(max(prompt_tokens.values()) + LONGEST + 1))


def _warm_up(server: TritonServer, prompt: str) -> None:
    """Many short answers: the server makes its threads, and the engine learns to expect too few tokens."""
    models = MODELS * (2 * SEATS)
    with ThreadPoolExecutor(2 * SEATS) as clients:
        list(clients.map(lambda model: ask(server, model, prompt, max_tokens=FEW), models))


def _send_all(site: Site, requests: Sequence[SoakRequest], seconds: float, streams: int) -> list[Ended]:
    """Send the requests in bursts that are spread over the time, and wait until all have ended."""
    begin = time.monotonic()
    with ThreadPoolExecutor(streams) as clients:
        ends = []
        for position, request in enumerate(requests):
            if position % streams == 0:
                time.sleep(max(0.0, begin + seconds * position / len(requests) - time.monotonic()))
            ends.append(clients.submit(_send, site, request))
        return [end.result() for end in ends]


def _send(site: Site, request: SoakRequest) -> Ended:
    try:
        return Ended(request, KINDS[request.kind](site, request))
    except Exception:
        return Ended(request, "wrong", traceback.format_exc())


def _at_rest(server: TritonServer) -> Idle:
    """The server as it is when everything has ended."""
    wait_until_at_rest(server, ["continuous"], seconds=60)
    status, metrics = engine_status(server, "continuous"), Metrics(server)
    return Idle(
        resident=_resident_bytes(server),
        finished=status["finished"],
        preemptions=int(metrics.value("preemptions_total", "continuous")),
        blocks_used=status["kv_blocks_used"],
        blocks_cached=int(metrics.value("kv_blocks_cached", "continuous")),
        blocks_total=status["kv_blocks_total"],
        gauges={name.removeprefix("slipstream_"): sum(metrics.samples(name)) for name in GAUGES_AT_REST},
        tracebacks=server.log_path.read_bytes().count(b"Traceback (most recent call last)"),
    )


def _resident_bytes(server: TritonServer) -> dict[tuple[str, int], int]:
    """Of every process of the server, by its role and its id."""
    roles = {server.pid: "tritonserver", engine_status(server, "continuous")["pid"]: "engine"}
    roles |= {stub.pid: f"stub {stub.model}" for stub in living_stubs(server.pid)}
    return {(roles.get(pid, "other"), pid): psutil.Process(pid).memory_info().rss for pid in server.process_ids()}


if __name__ == "__main__":
    main()
