"""What the machine can do, measured: products, memory, copies, launches, all-reduce."""
