"""What is done when a training goes wrong: the smallest safe step down, and a process that outlives its death."""
