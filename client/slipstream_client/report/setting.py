"""What ran, for a reader who sees the page alone: each batcher in a line, and the machine of the comparison."""

from __future__ import annotations

from slipstream_client.report.formats import listed
from slipstream_client.report.study import Study

BATCHERS = {
    "static": "the client sends a whole batch and gets it back whole; Triton forms none of its own",
    "dynamic": "Triton's dynamic_batching in front of a batch that runs in lock step until its longest answer ends",
    "iterative": "Triton's iterative sequences (sequence_batching, iterative_sequence: true); these form a new batch "
    "for every token",
    "continuous": "Slipstream's own scheduler with a paged KV cache, inside a decoupled model of the Python backend",
}


def batchers(study: Study) -> list[tuple[str, str]]:
    """Each variant of a model of Slipstream's that ran, and what it is; nothing of other models."""
    if "engine" not in (study.results.get("environment") or {}):
        return []
    found = []
    for variant in study.results["plan"]["variants"]:
        name, model = variant["name"], variant["model"]
        if name not in study.variants or model not in BATCHERS:
            continue
        switches = ", ".join(f"{key}={value}" for key, value in variant["switches"].items())
        words = BATCHERS[model] if name == model else f"{model}: {BATCHERS[model]}"
        executor = variant.get("executor", "native")
        more = [f"executor {executor}"] if executor != "native" else []
        found.append((name, "; ".join([words, *more, *([f"with {switches}"] if switches else [])])))
    return found


def machine(study: Study) -> str:
    """Model, device, processor, requests a run, and where the load came from, in one sentence."""
    environment = study.results.get("environment") or {}
    engine = environment.get("engine") or {}
    cpu, cores = environment.get("cpu"), environment.get("cores")
    cores_words = f"{cores} core{'' if cores == 1 else 's'}" if cores else ""
    place = ", ".join(filter(None, [cpu, cores_words]))
    model, device = (_one(engine.get(key)) for key in ("model", "device"))
    beside = any(run.get("rss_bytes") is not None for run in study.runs)  # read only of a server on this machine
    server = f"{model or 'A model'} on {device}" if device else model
    known = [server, place if beside or not place else f"load from {place}", _requests(study)]
    if beside:
        known.append("the load generator ran on the same machine")
    said = "; ".join(filter(None, known))
    return f"{said}. Ratios on another device will differ." if said else ""


def _one(value: object) -> str:
    """A parameter of the engines; where they differ, all of its values."""
    values = value.values() if isinstance(value, dict) else [value]
    return " or ".join(dict.fromkeys(str(each) for each in values if each is not None))


def _requests(study: Study) -> str:
    """ "6, 12 and 48 measured requests a run at 1, 4 and 16 clients"."""
    family = study.main
    if family is None:
        return ""
    counts = [max(cell.runs[0]["requests"] for cell in study.cells(family.workload, load)) for load in family.loads]
    if len(set(counts)) == 1:
        return f"{counts[0]} requests a run"
    places = listed([f"{load.at:g}" for load in family.loads])
    return f"{listed([str(count) for count in counts])} requests a run at {places} {family.axis}"
