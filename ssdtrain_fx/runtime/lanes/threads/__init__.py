"""Threads that move chunks: through staging buffers, or through KvikIO."""
