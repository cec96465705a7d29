"""Finding, starting, watching and stopping a tritonserver, and what a machine has for it."""
