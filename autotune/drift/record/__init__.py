"""In the process: gradients, steps and random numbers of a training, recorded without disturbing it."""
