"""What one engine knows: entries, chunks, slots and counters, and every change of their state."""
