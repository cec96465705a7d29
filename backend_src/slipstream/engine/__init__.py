"""The engine: requests, scheduler, block pool, sampler and step loop. It knows token ids, never text, and nothing of Triton."""
