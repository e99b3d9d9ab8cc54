"""vLLM's scheduler, simulated request by request."""
