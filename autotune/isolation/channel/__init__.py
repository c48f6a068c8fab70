"""What a trial and its supervisor share while it runs."""
