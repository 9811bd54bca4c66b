"""From a Dynamo graph to a compiled function: the backend, and the two inner compilers it hands graphs to."""
