"""Why an answer is what it is: what each of its changes is worth, measured, and what else there is to know."""
