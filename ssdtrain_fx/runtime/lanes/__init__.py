"""Lanes move chunks between tensors and the spill file: by native AIO, by threads, or by KvikIO."""
