"""What is printed past any styling, where the terminal's encoding has few signs."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable

import pytest

from autotune.cli.view.terminal import print_json, print_plain


def show(monkeypatch: pytest.MonkeyPatch, show_text: Callable[[str], None], text: str) -> str:
    """Return what a terminal with an encoding of 256 signs is given."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1", write_through=True))
    show_text(text)
    return raw.getvalue().decode("latin-1")


def test_json_says_the_same_in_any_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    label = {"label": "trän 训练 😀.py"}
    shown = show(monkeypatch, print_json, json.dumps(label, ensure_ascii=False))
    assert json.loads(shown) == label
    assert "trän" in shown


def test_a_text_has_a_mark_for_a_sign_that_cannot_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert show(monkeypatch, print_plain, "trän 训.py") == "trän ?.py\n"
