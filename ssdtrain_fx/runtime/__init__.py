"""The runtime: ops, engine, slots, staging and I/O. It does not use FX graphs and imports nothing from passes.

Importing :mod:`ssdtrain_fx.runtime.ops` registers the four ops.
"""
