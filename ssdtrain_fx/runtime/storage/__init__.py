"""Storage: the spill file, its slots and its directory."""
