"""The stage that tries settings: what to try next, and the Optuna study that keeps what was found."""
