"""What lies between the matmuls: norms, rotary embedding, KV cache and attention, once in numba and once in torch."""
