"""What is said beside the result, on stderr: talk, errors, and a search or a training as it runs."""
