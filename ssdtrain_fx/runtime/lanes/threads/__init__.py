"""Threads: move chunks through a transport, which is staging or KvikIO."""
