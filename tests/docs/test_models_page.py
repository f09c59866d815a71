"""docs/models.md says what is tested, no more and no less."""

from __future__ import annotations

from tests.docs.models_page import CHECKS, PAGE, checked, written
from tests.models import KINDS


def test_the_page_is_that_of_the_tests() -> None:
    page = PAGE.read_text()
    assert written(page) == page, "docs/models.md is stale; run: python -m tests.docs.models_page"


def test_every_family_passes_every_check() -> None:
    for check in CHECKS:
        assert checked(check) == set(KINDS), check
