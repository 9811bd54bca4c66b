"""Host and device memory: staging buffers, reload targets, layouts, and copies between them."""
