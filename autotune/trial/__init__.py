"""One config in one process: whatever happens in there is a result."""
