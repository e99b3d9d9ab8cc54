"""What fills a GPU: weights, KV cache, activations and what runtimes hold, against the budget."""
