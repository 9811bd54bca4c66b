"""The spill file: its directory, its slots, and striping over several drives."""
