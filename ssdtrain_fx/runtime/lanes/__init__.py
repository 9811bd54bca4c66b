"""Lanes: move chunks between tensors and the spill file, by native AIO, threads or KvikIO."""
