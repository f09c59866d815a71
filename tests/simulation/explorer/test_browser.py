"""Where no browser is, the tests that need one are skipped with a reason, unless one is required."""

from __future__ import annotations

import pytest

from tests.simulation.explorer.browser import REQUIRED, start


def test_no_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="chromium and chromedriver not found on PATH"):
        start()
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match=f"{REQUIRED}=1 asks for it"):
        start()
