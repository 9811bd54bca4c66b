"""Memory: staging buffers, reload targets, layouts, and copies between them."""
