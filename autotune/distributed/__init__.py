"""One training in several processes, a rank each: who takes which samples, how gradients come together."""
