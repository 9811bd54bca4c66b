"""Rules of one engine: how long to wait, what to keep, what to read ahead, what to move only once."""
