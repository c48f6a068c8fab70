"""The source of a target, read and never imported: where it is, what it names, what it depends on, who is beside it."""
