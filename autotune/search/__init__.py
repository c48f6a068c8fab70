"""From a probe's facts to a proven answer, inside a deadline."""
