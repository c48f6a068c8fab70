"""What a target's data cost: one look at the samples, the loader alone, working and waiting told apart."""
