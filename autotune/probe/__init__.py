"""Observe before changing anything: the machine, its limits, the target as it is, and which limit binds a step."""
