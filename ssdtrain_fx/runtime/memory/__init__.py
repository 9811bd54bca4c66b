"""Memory: the arena of compiled steps, staging buffers, reload targets, layouts, and copies."""
