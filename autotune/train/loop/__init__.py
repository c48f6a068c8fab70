"""A training in progress: its steps, checks of its health, checkpoints, evaluations and figures."""
