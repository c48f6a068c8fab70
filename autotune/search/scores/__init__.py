"""What launches are worth: their values, the baseline's level, where the configs stand. Pure."""
