"""What a script may change: a view of its working folder, and a fence around everything else."""
