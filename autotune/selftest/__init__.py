"""The tool tested on itself: searches in which the truth is known, real ones and replayed ones."""
