"""Runtime: moves bytes; the ops call its engines. It does not use FX graphs.

Importing :mod:`ssdtrain_fx.runtime.ops` registers the four ops.
"""
