"""The memory plan of a GPU: weights, KV cache, activations and runtime overhead."""
