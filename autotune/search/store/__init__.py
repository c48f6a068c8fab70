"""A search on disk: its folder, its seal, the probe that is kept for the next one."""
