"""What a training is given: a profile's settings, a preset's or the target's own, and whether they still hold here."""
