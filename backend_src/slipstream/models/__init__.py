"""Weights, model code, kernels and the runner that puts a batch of tokens through them."""
