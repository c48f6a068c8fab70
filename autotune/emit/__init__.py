"""What leaves: a config in another tool's format, and the report of a search as one HTML page."""
