"""The stage that proves: paired rounds against the baseline, the risk they may take, the time kept for them."""
