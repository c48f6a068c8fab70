"""Digit classification with a small transformer."""

__version__ = "0.3.0"
