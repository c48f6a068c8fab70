"""Trials that start in a fraction of a second: forked from a process that has imported torch."""
