"""An engine that dies again and again: it is started again, each time a little later, and in the end left down."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deadline import wait_until
from slipstream.config import EngineConfig
from slipstream.engine import link as link_module
from slipstream.engine.link import EngineFailed, EngineLink
from slipstream.errors import Unavailable


class DyingLink(EngineLink):
    """Its engines live for the times that it is given, on a clock of its own; one with no time never starts."""

    def __init__(self, directory: Path, lives: list[float], patch: pytest.MonkeyPatch) -> None:
        self.downs: list[str] = []
        self.pauses: list[float] = []
        self._lives, self._now = iter(lives), 0.0
        clock = SimpleNamespace(monotonic=lambda: self._now, sleep=self.pauses.append)
        patch.setattr(link_module, "time", clock)
        super().__init__(EngineConfig(name="tiny"), directory, lambda update: None, self.downs.append)
        (directory / "tiny.log").write_text("starting\nMemoryError: none left\n")

    def _connect(self) -> Any:
        life = next(self._lives, None)
        if life is None:
            self._closing = True
        if not life:
            raise EngineFailed("engine 'tiny' did not start")
        return SimpleNamespace(info=None, life=life, close=lambda: None)

    def _serve(self, session: Any) -> None:
        self._now += session.life


def test_after_five_deaths_in_a_row_it_stays_down_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = DyingLink(tmp_path, [1.0, 2.0, 0.0, 3.0, 0.0, 1000.0], monkeypatch)
    link.start()
    wait_until(lambda: not link._thread.is_alive(), "the link has given up")
    died, failed, again = "engine 'tiny' died", "engine 'tiny' did not start", " and is being started again"
    assert link.downs[:4] == [died + again, died + again, failed + again, died + again]
    assert link.downs[4].startswith(f"{failed} for the 5th time in a row and stays down; load its models again")
    assert "MemoryError: none left" in link.downs[4]
    assert link.pauses[:4] == pytest.approx([0.0, 0.2, 0.6, 1.4])
    with pytest.raises(Unavailable, match="for the 5th time in a row"):
        link.submit([])
    assert not link.up
    link.close()


def test_a_long_life_between_two_deaths_makes_them_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = DyingLink(tmp_path, [1.0, 1.0, 1.0, 61.0, 1.0, 1.0, 1.0], monkeypatch)
    link.start()
    wait_until(lambda: not link._thread.is_alive(), "all lives are over")
    assert len(link.downs) == 7
    assert all("is being started again" in reason for reason in link.downs)
