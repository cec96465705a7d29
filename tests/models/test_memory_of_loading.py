"""Loading a model takes little more memory than its packed weights have: measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slipstream.errors import ModelNotFound
from slipstream.models.store import resolve

# Peak memory of the process beyond what its imports had taken, as a share of the packed weights.
_PROGRAM = """
import sys, torch
from slipstream.models import cpu_weights, packed_store
from slipstream.models.kernels import cpu_step
from slipstream.models.store import resolve
from slipstream.models.weights import Checkpoint, ModelConfig
folder, (how, storage) = resolve("smollm2-135m"), sys.argv[1:]
config = ModelConfig.from_folder(folder)
def peak():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024
before = peak()
if how == "packing":
    weights = cpu_weights.pack_weights(config, Checkpoint(folder), storage)
else:
    weights = packed_store.load_weights(config, folder, storage)
arrays = [array for field in weights for array in (field if isinstance(field, tuple) else (field,))]
print((peak() - before) / sum(array.nbytes for array in arrays))
"""


@pytest.mark.parametrize(("how", "storage"), [("reading", "fp16"), ("packing", "fp16"), ("packing", "int8")])
def test_loading_takes_no_more_than_1_3_of_the_packed_size(how: str, storage: str) -> None:
    try:
        resolve("smollm2-135m")
    except ModelNotFound as error:
        pytest.skip(str(error))
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM, how, storage], capture_output=True, text=True, timeout=120, check=True
    )
    assert 0.5 < float(result.stdout) <= 1.3
