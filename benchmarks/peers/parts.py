"""What is compared with whom, at which points, and the ratio that is asked for at each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.peers import end_to_end, llama_bench
from benchmarks.peers.child import run_module
from benchmarks.peers.end_to_end import Load, Served
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.ratios import Part, Piece, Point, Values

NAMES = ("decode", "decode-512", "prefill", "int8", "server", "mixed", "triton", "transformers")
_OUTPUT = 32  # decode steps; contexts are given by their middle
_PROMPTS = {128: 112, 512: 496}
_DECODE_BARS = {
    128: {1: 1.0, 4: 1.15, 8: 1.15, 16: 1.2, 32: 1.2, 64: 1.25},
    512: {1: 1.0, 4: 1.0, 8: 1.0, 16: 1.0, 32: 1.0, 64: 1.0},
}
_INT8_BARS = {16: 1.3, 32: 1.3, 64: 1.3}
_PREFILL_BARS = {64: 1.15, 256: 1.15, 1024: 1.15}
_SERVER_BARS = {8: 1.2, 16: 1.4, 32: 1.4, 64: 1.4}
_MIXED_CLIENTS, _MIXED_BAR, _LEAST_THROUGH_TRITON = 32, 1.5, 0.85
_TRANSFORMERS_SEQUENCES = (1, 8, 32)
_REQUEST = 64  # tokens of a prompt, and of its answer, end to end and beside transformers
_EQUAL = f"fixed:{_REQUEST},{_REQUEST}"
_END_TO_END = "End to end: Triton with `continuous` against llama-server with F16, both under our load generator"


@dataclass(frozen=True)
class Setting:
    """What all parts share. `quick` measures a few points of each."""

    llama: LlamaCpp | None  # None: no part needs it
    threads: int
    quick: bool = False

    @property
    def requests(self) -> int:
        """Of each client end to end, after one to warm up."""
        return 1 if self.quick else 2

    def few(self, bars: Mapping[int, float]) -> dict[int, float]:
        """Bars by what is counted; of a quick run the first two that are not alone in their batch."""
        return dict(list(bars.items())[:2]) if self.quick else dict(bars)

    def ours(self, what: str, **options: Any) -> dict[int, float]:
        """Figures of our engine in process, see `ours.py`."""
        return _figures("ours", what, self.threads, options)


def needs_llama(name: str) -> bool:
    """Whether a part compares with llama.cpp."""
    return name not in ("triton", "transformers")


def make_part(name: str, setting: Setting) -> Part:
    """One of NAMES."""
    makers: dict[str, Callable[[Setting], Part]] = {
        "decode": lambda setting: _decode(setting, "decode", 128),
        "decode-512": lambda setting: _decode(setting, "decode-512", 512),
        "prefill": _prefill,
        "int8": _int8,
        "server": _server,
        "mixed": _mixed,
        "triton": _triton,
        "transformers": _transformers,
    }
    return makers[name](setting)


def _decode(setting: Setting, name: str, context: int) -> Part:
    title = f"Decode at context {context}, fp16 weights, against llama-batched-bench with F16"
    piece = _decode_piece(setting, context, setting.few(_DECODE_BARS[context]), "fp16", "F16")
    return Part(name, title, [piece])


def _int8(setting: Setting) -> Part:
    pieces = [_decode_piece(setting, 128, setting.few(_INT8_BARS), "int8", "Q8_0")]
    return Part("int8", "Decode, int8 weights, against llama-batched-bench with Q8_0", pieces)


def _decode_piece(setting: Setting, context: int, bars: Mapping[int, float], weights: str, format: str) -> Piece:
    points = {count: Point(f"{_sequences(count)}, context {context}", bar=bar) for count, bar in bars.items()}
    prompt = _PROMPTS[context]

    def ours(number: int) -> Values:
        return _at(points, setting.ours("decode", weights=weights, sequences=points, prompt=prompt, output=_OUTPUT))

    def peer(number: int) -> Values:
        assert setting.llama
        return _at(points, llama_bench.decode(setting.llama, format, setting.threads, [*points], prompt, _OUTPUT))

    return Piece([*points.values()], ours, peer)


def _prefill(setting: Setting) -> Part:
    points = {length: Point(f"{length} tokens", bar=bar) for length, bar in setting.few(_PREFILL_BARS).items()}

    def ours(number: int) -> Values:
        return _at(points, setting.ours("prefill", prompt=points))

    def peer(number: int) -> Values:
        assert setting.llama
        return _at(points, llama_bench.prefill(setting.llama, "F16", setting.threads, [*points]))

    title = "Prefill of one sequence, fp16 weights, against llama-batched-bench with F16"
    return Part("prefill", title, [Piece([*points.values()], ours, peer)])


def _server(setting: Setting) -> Part:
    pieces = [
        _server_piece(setting, Load(_EQUAL, clients, setting.requests), bar)
        for clients, bar in setting.few(_SERVER_BARS).items()
    ]
    return Part("server", _END_TO_END, pieces)


def _mixed(setting: Setting) -> Part:
    load = Load("mixed", 2 if setting.quick else _MIXED_CLIENTS, requests=1, cools_down=True)
    return Part(
        "mixed", f"{_END_TO_END}, lengths as in chats", [_server_piece(setting, load, _MIXED_BAR, ttft_bar=1.0)]
    )


def _server_piece(setting: Setting, load: Load, bar: float, ttft_bar: float | None = None) -> Piece:
    speed = Point(load.name, bar=bar)
    ttft = Point(f"{load.name}: P99 TTFT", "ms", bar=ttft_bar, at_most=True)

    def values(served: Served) -> Values:
        return {speed: served.tokens_per_s, ttft: served.p99_ttft_ms}

    def ours(number: int) -> Values:
        return values(end_to_end.serve_ours(setting.threads, load, seed=number))

    def peer(number: int) -> Values:
        assert setting.llama
        return values(end_to_end.serve_llama(setting.llama, setting.threads, load, seed=number))

    return Piece([speed, ttft], ours, peer)


def _triton(setting: Setting) -> Part:
    """What Triton leaves of the engine's throughput: here the peer is our engine in process, without a client."""
    load = Load(_EQUAL, 8 if setting.quick else 32, setting.requests)
    point = Point(load.name, bar=_LEAST_THROUGH_TRITON)
    sizes = {"sequences": [load.clients], "prompt": _REQUEST, "output": _REQUEST, "requests": load.requests}

    def ours(number: int) -> Values:
        return {point: end_to_end.serve_ours(setting.threads, load, seed=number).tokens_per_s}

    def engine(number: int) -> Values:
        return {point: setting.ours("closed-loop", **sizes)[load.clients]}

    return Part("triton", "Through Triton, against the same engine alone", [Piece([point], ours, engine)])


def _transformers(setting: Setting) -> Part:
    title = f"{_REQUEST} prompt tokens and {_REQUEST} generated, begun at once, against transformers in fp32"
    return Part("transformers", title, [_transformers_piece(setting, how) for how in ("generate", "generate_batch")])


def _transformers_piece(setting: Setting, how: str) -> Piece:
    counts = _TRANSFORMERS_SEQUENCES[:2] if setting.quick else _TRANSFORMERS_SEQUENCES
    points = {count: Point(f"{how}(), {_sequences(count)}") for count in counts}
    sizes = {"sequences": points, "prompt": _REQUEST, "output": _REQUEST}

    def ours(number: int) -> Values:
        return _at(points, setting.ours("batch", **sizes))

    def peer(number: int) -> Values:
        return _at(points, _figures("hf_generate", how, setting.threads, sizes))

    return Piece([*points.values()], ours, peer)


def _figures(module: str, what: str, threads: int, options: Mapping[str, Any]) -> dict[int, float]:
    """What a module of this package reports, run in a process of its own; collections become comma-separated."""
    arguments = [what, "--threads", str(threads)]
    for name, value in options.items():
        text = str(value) if isinstance(value, str | int) else ",".join(map(str, value))
        arguments += [f"--{name}", text]
    return {int(key): value for key, value in run_module(module, *arguments).items()}


def _at(points: Mapping[int, Point], figures: Mapping[int, float]) -> Values:
    return {point: figures[key] for key, point in points.items()}


def _sequences(count: int) -> str:
    return f"{count} sequence{'s' * (count != 1)}"
