"""autotune as Python calls it: what the command line takes as words is taken as values, results say what they are."""
