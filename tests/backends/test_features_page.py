"""docs/reference/features.md says of every feature and kernel what the code says."""

import pytest

pytest.importorskip("cupy")

import features


def test_the_page_agrees_with_the_code():
    """If this fails, run `python tests/tools/features.py`."""
    assert features.PAGE.read_text("utf-8") == features.page()
