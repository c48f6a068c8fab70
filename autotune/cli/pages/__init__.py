"""Results on stdout: a page for people on a terminal, one fact a line in a pipe."""
