"""How long until the first token: `python -m benchmarks.start [--rounds N]`.

From `slipstream serve` to the first token of `continuous`, in turn with what cannot be saved: importing torch and
tokenizers and reading the packed weights, in a fresh interpreter. What was kept at set-up is there in both.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request

from slipstream.models.packed_store import packed_folder
from slipstream.models.prepare import prepare
from slipstream.models.store import resolve
from slipstream_client.server.ports import free_ports

MOST = 2.0  # times the other
_NEEDED = """
import sys, time
start = time.perf_counter()
import torch, tokenizers
import numpy as np
from pathlib import Path
for file in Path(sys.argv[1]).glob("*.npy"):
    np.load(file)
print(time.perf_counter() - start)
"""
_BODY = json.dumps({"text_input": "Hello", "max_tokens": 1, "temperature": 0}).encode()


def main() -> None:
    """Run the benchmark and print both times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    folder = resolve(arguments.model)
    prepare(folder, "fp16", lambda phase, *_: print(f"{phase} …", file=sys.stderr))
    needed, served = [], []
    for _ in range(arguments.rounds):
        needed.append(_needed_s(str(packed_folder(folder, "fp16"))))
        served.append(_first_token_s(arguments.model))
        print(f"{served[-1]:.2f} s to the first token, {needed[-1]:.2f} s needed", file=sys.stderr)
    ratios = [one / other for one, other in zip(served, needed, strict=True)]
    print(
        f"first token after {statistics.median(served):.2f} s, of which {statistics.median(needed):.2f} s are needed: "
        f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}x to {max(ratios):.2f}x; bar {MOST:g}x)"
    )


def _needed_s(packed: str) -> float:
    result = subprocess.run([sys.executable, "-c", _NEEDED, packed], capture_output=True, text=True, check=True)
    return float(result.stdout)


def _first_token_s(model: str) -> float:
    """Start a server as a user would and ask until it answers."""
    ports = free_ports(3)
    options = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)]
    command = [sys.executable, "-c", "from slipstream_client.cli import main; main()", "serve", "--models=continuous"]
    start = time.perf_counter()
    server = subprocess.Popen(
        [*command, f"--model={model}", *options],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "SLIPSTREAM_DEVICE": "cpu"},
    )
    try:
        while not _answers(f"http://127.0.0.1:{ports[0]}/v2/models/continuous/generate"):
            if server.poll() is not None:
                raise SystemExit(f"slipstream serve has ended with exit code {server.returncode}")
            time.sleep(0.02)
        return time.perf_counter() - start
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)


def _answers(url: str) -> bool:
    request = urllib.request.Request(url, _BODY, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


if __name__ == "__main__":
    main()
