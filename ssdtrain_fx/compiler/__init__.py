"""Compiler: from a Dynamo graph to a compiled function, by Inductor or node by node."""
