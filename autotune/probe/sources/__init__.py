"""A target as the probe sees it: one interface, a workload and a script behind it."""
