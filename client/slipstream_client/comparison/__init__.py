"""The same requests to every batcher, and the figures that come of it."""
