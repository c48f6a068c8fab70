"""Starting the trials of a search: limits, time, prices, and which configs are not even started."""
