"""How a command starts a script: which python, with which options, by torchrun or not; and what is refused."""
