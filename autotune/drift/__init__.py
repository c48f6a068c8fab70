"""Is it the same training? Compared in a search before anything is claimed, and watched in the final training."""
