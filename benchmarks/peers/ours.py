"""Our engine in process, without Triton: `python -m benchmarks.peers.ours WHAT [...]` prints what it did as JSON.

All figures are tokens/s, by what they are of: the number of sequences, or of prompt tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from benchmarks.peers.child import report
from benchmarks.prompts import prompt_ids
from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.request import Request, SamplingParams
from slipstream.errors import ConfigError
from slipstream.models.runner import ModelRunner
from slipstream.models.store import resolve
from slipstream.models.weights import ModelConfig

_TIMES = 3  # each prompt is prefilled; the median counts


def main() -> None:
    """Measure one thing and report it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("decode", "prefill", "batch", "closed-loop"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="fp16")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--sequences", default="1", help="comma-separated; of closed-loop: the clients")
    parser.add_argument("--prompt", default="64", help="prompt tokens; comma-separated for prefill")
    parser.add_argument("--output", type=int, default=32, help="tokens generated of each sequence")
    parser.add_argument("--requests", type=int, default=3, help="measured requests of each client of closed-loop")
    arguments = parser.parse_args()
    counts, prompts = ([int(each) for each in text.split(",")] for text in (arguments.sequences, arguments.prompt))
    # Room for all sequences at once, and all their prompts in one step; but where requests come and go as in a server,
    # its own budget and prefix cache are what is measured.
    as_served = arguments.what == "closed-loop"
    folder = resolve(arguments.model)
    try:
        config = EngineConfig(
            name="benchmark",
            model=arguments.model,
            device="cpu",
            weights=arguments.weights,
            threads=arguments.threads,
            max_num_seqs=64,
            max_num_batched_tokens=0 if as_served else max(64, max(counts) * max(prompts)),
            kv_cache_bytes=_kv_cache_bytes(folder, max(counts), max(prompts) + arguments.output),
            prefix_cache=as_served,
        )
    except ConfigError as error:
        report({"unavailable": str(error)})
        return
    runner = ModelRunner(config, folder)
    if arguments.what == "prefill":
        figures = {length: _prefill(config, runner, length) for length in prompts}
    elif arguments.what == "closed-loop":
        figures = {
            count: _closed_loop(config, runner, count, prompts[0], arguments.output, arguments.requests)
            for count in counts
        }
    else:
        of_kind = _decode if arguments.what == "decode" else _batch
        of_kind(config, runner, 1, prompts[0], arguments.output)  # the first steps of a process are slower
        figures = {count: of_kind(config, runner, count, prompts[0], arguments.output) for count in counts}
    report({str(key): value for key, value in figures.items()})


def _decode(config: EngineConfig, runner: ModelRunner, count: int, prompt: int, output: int) -> float:
    """From the mean of `output` steps in which all sequences decode, their prompts computed before."""
    engine = _engine(config, runner, count, prompt, output + 1)
    while any(not request.num_output_tokens for request in engine.requests.values()):
        engine.step()
    start = time.perf_counter()
    for _ in range(output):
        engine.step()
    duration_s = time.perf_counter() - start
    assert not engine.requests  # every one of these steps has computed every sequence
    return count * output / duration_s


def _prefill(config: EngineConfig, runner: ModelRunner, prompt: int) -> float:
    """From the median step that computes a whole prompt of one sequence."""
    durations_s = []
    for _ in range(_TIMES):
        engine = _engine(config, runner, 1, prompt, 1)
        start = time.perf_counter()
        engine.step()
        durations_s.append(time.perf_counter() - start)
        assert not engine.requests
    return prompt / statistics.median(durations_s)


def _batch(config: EngineConfig, runner: ModelRunner, count: int, prompt: int, output: int) -> float:
    """Generated tokens/s of sequences that all begin at once, their prompts computed within that time."""
    engine = _engine(config, runner, count, prompt, output)
    start = time.perf_counter()
    while engine.has_work:
        engine.step()
    return count * output / (time.perf_counter() - start)


def _closed_loop(
    config: EngineConfig, runner: ModelRunner, clients: int, prompt: int, output: int, requests: int
) -> float:
    """Generated tokens/s where a request comes as soon as another has ended, after one of each client to warm up.

    As the load generator has it: from the first measured request's beginning to the last one's end.
    """
    engine = Engine(config, runner)
    total = clients * (requests + 1)
    started = ended = 0
    begin = 0.0
    while ended < total:
        for _ in range(min(clients - (started - ended), total - started)):
            if started == clients:
                begin = time.perf_counter()
            engine.add(_request(started, prompt, output))
            started += 1
        ended += sum(request.finished for request in engine.step())
    return clients * requests * output / (time.perf_counter() - begin)


def _engine(config: EngineConfig, runner: ModelRunner, count: int, prompt: int, output: int) -> Engine:
    """With `count` requests that wait."""
    engine = Engine(config, runner)
    for index in range(count):
        engine.add(_request(index, prompt, output))
    return engine


def _request(index: int, prompt: int, output: int) -> Request:
    sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    return Request((b"", index), prompt_ids(index, prompt), sampling, arrival_time=time.monotonic())


def _kv_cache_bytes(folder: Path, sequences: int, tokens: int) -> int:
    """Room for so many sequences of so many tokens, each with a block more, in fp32."""
    model = ModelConfig.from_folder(folder)
    token_bytes = 2 * 4 * model.num_layers * model.num_kv_heads * model.head_dim
    return max(EngineConfig(name="default").kv_cache_bytes, sequences * (tokens + 32) * token_bytes)


if __name__ == "__main__":
    main()
