"""`python -m autotune`, and the console script's entry point."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from autotune.cli import app

    app()


if __name__ == "__main__":
    main()
