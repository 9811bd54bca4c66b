"""Policy: how long to wait, what to keep in memory, what to read ahead, what to write only once."""
