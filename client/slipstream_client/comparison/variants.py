"""What is compared: a batcher of the model repository as it stands or with switches set otherwise, or another server.

`continuous,prefix_cache=off` is the model `continuous` with another value of one of its parameters. A comparison gives
every variant a model of its own in a repository made for it, so that all are loaded side by side.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from slipstream_client.errors import SlipstreamError
from slipstream_client.load.targets import TARGETS
from slipstream_client.server.model_repository import ADMIN, list_models

# Of Triton's own configuration, beside the parameters.
_BATCHER_FIELDS = ("max_batch_size", "max_queue_delay_microseconds")
_OF_THE_CLIENT = ("name", "target", "url", "served_model")
_LONGEST_NAME = 30  # of an engine, since the path of its socket is bounded
_TRUTHS = {"on": "true", "off": "false"}


@dataclass(frozen=True)
class Variant:
    """One series of a comparison.

    Attributes:
        name: what it is called everywhere.
        model: the model of the repository that it is, or is made from; for another server, what that calls its model.
        switches: parameters of the model's configuration with other values.
        target: how it is asked, one of `TARGETS`.
        url: of another server than the comparison's own.
    """

    name: str
    model: str
    switches: Mapping[str, str] = field(default_factory=dict)
    target: str = "grpc"
    url: str | None = None

    @property
    def served_name(self) -> str:
        """Its model's name at the server."""
        if self.url is not None or not self.switches:
            return self.model
        switches = "-".join(map("_".join, sorted(self.switches.items())))
        readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{self.model}-{switches}")
        if len(readable) <= _LONGEST_NAME:
            return readable
        return f"{self.model[: _LONGEST_NAME - 9]}-{hashlib.sha256(switches.encode()).hexdigest()[:8]}"

    @property
    def executor(self) -> str:
        """What computes the model: "native" or "transformers"."""
        return self.switches.get("executor", "native")

    def describe(self) -> dict[str, Any]:
        """What results.json says about it."""
        return {
            "name": self.name,
            "model": self.model,
            "executor": self.executor,
            "target": self.target,
            "switches": dict(self.switches),
        }


def parse_variant(text: str) -> Variant:
    """Read `MODEL[,SWITCH=VALUE...]`.

    Further fields are `target`, `name`, and for a server of its own `url` and `served_model`.

    Raises:
        SlipstreamError: a part that is no SWITCH=VALUE, one that is given twice, or an unknown target.
    """
    model, *parts = (part.strip() for part in text.split(","))
    if not model or "=" in model:
        raise SlipstreamError(f"--variant {text!r} names no model; it is MODEL[,SWITCH=VALUE...]")
    values: dict[str, str] = {}
    for part in parts:
        key, separator, value = (piece.strip() for piece in part.partition("="))
        if not key or not separator or not value:
            raise SlipstreamError(f"--variant {text!r}: {part!r} is no SWITCH=VALUE")
        if key in values:
            raise SlipstreamError(f"--variant {text!r} gives {key} twice")
        values[key] = _TRUTHS.get(value.lower(), value)
    ours = {key: values.pop(key) for key in _OF_THE_CLIENT if key in values}
    target, url = ours.get("target", "grpc"), ours.get("url")
    if target not in TARGETS:
        raise SlipstreamError(f"--variant {text!r}: target is {target!r}; allowed are {', '.join(TARGETS)}")
    if url is None and (target == "openai" or "served_model" in ours):
        raise SlipstreamError(f"--variant {text!r}: a server of its own needs url=")
    if url is not None and values:
        raise SlipstreamError(f"--variant {text!r}: {next(iter(values))} cannot be set at another server")
    served = ours.get("served_model", model)
    return Variant(ours.get("name") or _name(model, values, target), served, values, target, url)


def _name(model: str, switches: Mapping[str, str], target: str) -> str:
    """As people say it: "dynamic (transformers)", "continuous, prefix_cache=off"."""
    executor = switches.get("executor", "native")
    said = [model if executor == "native" else f"{model} ({executor})"]
    falsehoods = {value: key for key, value in _TRUTHS.items()}
    said += [f"{key}={falsehoods.get(value, value)}" for key, value in switches.items() if key != "executor"]
    return ", ".join(said + ([f"target={target}"] if target not in ("grpc", "openai") else []))


def derive_repository(source: Path, variants: Sequence[Variant], folder: Path) -> None:
    """Make a model repository with one model for each variant, and `admin`, out of the one at `source`.

    Raises:
        SlipstreamError: a variant's model is not in `source`, or a switch is none that its configuration has.
    """
    available = list_models(source)
    for variant in variants:
        if variant.model not in available or variant.model == ADMIN:
            others = ", ".join(name for name in available if name != ADMIN)
            raise SlipstreamError(f"no model {variant.model!r} in {source}; there are {others}")
        if not (folder / variant.served_name).exists():  # two variants of the same switches are the same model
            _copy_model(source / variant.model, folder / variant.served_name, variant.switches)
    if ADMIN in available:
        _copy_model(source / ADMIN, folder / ADMIN, {})


def set_switches(model: Path, switches: Mapping[str, str]) -> None:
    """Change a model's configuration in its repository; its server sees it when the model is loaded again.

    Where it is a copy under another name, it takes that name.

    Raises:
        SlipstreamError: a switch is none that the configuration has, or its value is none that is allowed.
    """
    path = model / "config.pbtxt"
    config = text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    if config.name != model.name:
        config.name = model.name
        config.parameters["name"].string_value = model.name  # an engine of its own
    for key, value in switches.items():
        if key in _BATCHER_FIELDS:
            _set_batcher_field(config, key, value)
        else:
            config.parameters[key].string_value = value
    _check_parameters(config)
    path.write_text(text_format.MessageToString(config), encoding="utf-8")


def _copy_model(source: Path, target: Path, switches: Mapping[str, str]) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    if switches:
        set_switches(target, switches)


def _set_batcher_field(config: Any, key: str, value: str) -> None:
    if not value.isdigit() or not 0 <= int(value) < 1 << 31:
        raise SlipstreamError(f"{key} is {value!r}; it must be a whole number")
    if key == "max_batch_size":
        if config.max_batch_size < 1 or int(value) < 1:
            raise SlipstreamError(f"max_batch_size is {value}; {config.name} cannot have that many")
        config.max_batch_size = int(value)
    elif not config.HasField("dynamic_batching"):
        raise SlipstreamError(f"{config.name} has no dynamic batcher, so no {key}")
    else:
        config.dynamic_batching.max_queue_delay_microseconds = int(value)


def _check_parameters(config: Any) -> None:
    """Refuse here what the model would refuse when it is loaded, some seconds later and in its log."""
    from slipstream.config import EngineConfig
    from slipstream.errors import ConfigError

    parameters = {key: value.string_value for key, value in config.parameters.items()}
    try:
        EngineConfig.from_parameters({"name": config.name} | parameters, environment={})
    except ConfigError as error:
        raise SlipstreamError(f"{config.name}: {error}") from error
