"""The final training of a script: its own command, supervised from outside."""
