"""One study that several machines search together, in a database that all of them reach."""
