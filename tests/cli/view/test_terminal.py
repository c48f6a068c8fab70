"""What is printed past any styling, where the terminal's encoding has few signs."""

from __future__ import annotations

import io
import json
import sys

import pytest

from autotune.cli.view.terminal import print_json, print_plain


@pytest.fixture
def latin(monkeypatch: pytest.MonkeyPatch) -> io.BytesIO:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1", write_through=True))
    return raw


def test_json_says_the_same_in_any_encoding(latin: io.BytesIO) -> None:
    print_json(json.dumps({"label": "trän 训练 😀\u202e.py"}, ensure_ascii=False))
    assert json.loads(latin.getvalue().decode("latin-1")) == {"label": "trän 训练 😀\u202e.py"}
    assert "trän" in latin.getvalue().decode("latin-1")


def test_a_text_has_a_mark_for_a_sign_that_cannot_be_shown(latin: io.BytesIO) -> None:
    print_plain("trän 训.py")
    assert latin.getvalue().decode("latin-1") == "trän ?.py\n"
