"""The stage that tries settings: what to try next, and the Optuna study that keeps what was found."""

import warnings

# Optuna's progress bar says so where it is imported in a notebook, and none of its bars is shown.
warnings.filterwarnings("ignore", message="IProgress not found")
