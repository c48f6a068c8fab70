"""Which knobs to try first, why, and what to expect of each. Records in, ranked `Advice` out; pure."""
