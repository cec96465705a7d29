"""Slipstream's server side: the engine, the models it runs, the batching policies, and the doors that Triton calls."""
