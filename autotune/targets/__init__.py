"""What is tuned: a workload, and where it comes from."""
