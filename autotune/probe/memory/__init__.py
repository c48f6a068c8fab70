"""How much memory a training takes, and would take with other settings."""
