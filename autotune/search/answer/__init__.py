"""From what was measured to the profile that is saved."""
