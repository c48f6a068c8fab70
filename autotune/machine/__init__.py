"""What the machine is, read from the kernel and the driver; nothing here starts torch."""
