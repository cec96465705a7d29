"""A Triton model repository of models that do one thing each, without a language model."""

from __future__ import annotations

from pathlib import Path

_CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 0
input [ {{ name: "text_input" data_type: TYPE_STRING dims: [1] }} ]
output [ {{ name: "text_output" data_type: TYPE_STRING dims: [1] }} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
"""

_MODEL = """
import json, os, signal, subprocess, sys, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        {initialize}

    def execute(self, requests):
        answers = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
            output = np.array([({answer}).encode()], dtype=object)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", output)]))
        return answers
"""

_GAUGE = """self.family = pb_utils.MetricFamily(
            name="slipstream_engine_up", description="up", kind=pb_utils.MetricFamily.GAUGE)
        self.gauge = self.family.Metric(labels={"model": "tiny", "version": "1", "batcher": "continuous"})
        self.gauge.set(1)"""
_OUTLIVER = 'subprocess.Popen(["sleep", "1000"], start_new_session=True)'
_FACTS = (
    "json.dumps({'folder': os.getcwd(), 'prefix': sys.prefix, 'session': os.getsid(0), "
    "'environment': dict(os.environ)})"
)

# name: (what initialize does, the answer as an expression)
_MODELS = {
    "echo": ("pass", "text"),
    "facts": ("pass", _FACTS),
    "broken": ('raise ValueError("the weights are missing")', "text"),
    "slow": ("time.sleep(600)", "text"),
    "ends_server": ("os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)", "text"),
    "outliver": (_OUTLIVER, "text"),
    "gauge": (_GAUGE, "(self.gauge.set(float(text)), text)[1]"),
}


def write_repository(folder: Path) -> Path:
    """Write all of the tiny models into `folder` and return it."""
    for name, (initialize, answer) in _MODELS.items():
        version = folder / name / "1"
        version.mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(_CONFIG.format(name=name))
        model = _MODEL.replace("{initialize}", initialize).replace("{answer}", answer)
        (version / "model.py").write_text(model)
    return folder
