"""Find the Triton model repository to serve, and name the models in it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from slipstream_client.errors import SlipstreamError

ADMIN = "admin"  # tells of the engines, where that is wanted

_MODEL_PARAMETER = re.compile(r'key:\s*"model"[\s,;]*value:?\s*\{\s*string_value:\s*"(?P<name>[^"]+)"')


class RepositoryError(SlipstreamError):
    """There is no such model repository, or no such model in it."""


def find_repository(given: Path | None = None) -> Path:
    """The model repository: the `given` one, else $SLIPSTREAM_REPOSITORY, else `model_repository/` of the checkout.

    Raises:
        RepositoryError: it is no folder with models, or there is none.
    """
    if given is not None:
        return _with_models(given)
    from_environment = os.environ.get("SLIPSTREAM_REPOSITORY")
    if from_environment:
        return _with_models(Path(from_environment))
    for parent in Path(__file__).resolve().parents:
        candidate = parent / "model_repository"
        if candidate.is_dir():
            return _with_models(candidate)
    raise RepositoryError(
        "no model_repository/ beside this installation; name one with --repository DIR or $SLIPSTREAM_REPOSITORY"
    )


def list_models(repository: Path) -> list[str]:
    """Names of the models in `repository`, sorted."""
    return sorted(entry.parent.name for entry in repository.glob("*/config.pbtxt"))


def select_models(repository: Path, names: list[str] | None) -> list[str]:
    """`names` without repetitions if all are in `repository`; if `names` is None, all that serve requests."""
    available = list_models(repository)
    if names is None:
        return [name for name in available if name != ADMIN]
    for name in names:
        if name not in available:
            raise RepositoryError(f"no model {name!r} in {repository}; there are {', '.join(available)}")
    if not names:
        raise RepositoryError(f"no model named; there are {', '.join(available)}")
    return list(dict.fromkeys(names))


def language_models(repository: Path, models: Iterable[str]) -> list[str]:
    """The language models that these models' config.pbtxt name in their parameter `model`, without repetitions."""
    found = (_MODEL_PARAMETER.search((repository / model / "config.pbtxt").read_text()) for model in models)
    return list(dict.fromkeys(match["name"] for match in found if match))


def _with_models(repository: Path) -> Path:
    if not list_models(repository):
        raise RepositoryError(f"{repository} is no model repository: no folder with a config.pbtxt in it")
    return repository.resolve()
