"""The engine: requests, scheduler, block pool, sampler, step loop. Knows token ids, never text, nothing of Triton."""
