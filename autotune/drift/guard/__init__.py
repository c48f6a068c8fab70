"""In a final training: signs that it no longer learns as the baseline would."""
