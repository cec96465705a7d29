"""Ending a program with all it started, also what takes long to die."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil

from slipstream_client.server.tethered_process import TetheredProcess

# A process that was killed has lost its environment long before it has given back that much memory.
LARGE = "memory = bytearray(1 << 30); print('filled', flush=True); import time; time.sleep(600)"


def test_what_was_killed_counts_until_it_has_ended(tmp_path: Path) -> None:
    output = tmp_path / "output"
    process = TetheredProcess([sys.executable, "-c", LARGE], {}, tmp_path, output)
    while not (output.exists() and output.read_text() == "filled\n"):
        assert process.running
        time.sleep(0.02)
    below = [psutil.Process(pid) for pid in process.process_ids()]
    process.end_all(grace_s=0)
    assert process.process_ids() == []
    assert [each for each in below if each.is_running() and each.status() != psutil.STATUS_ZOMBIE] == []
