"""A step taken apart: its phases, twice its samples, and what its computation is spent on."""
