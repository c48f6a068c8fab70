"""What a script may change: a view of its working folder, a fence around everything else, and seeds."""
