"""vLLM's scheduler, replayed request by request, compiled."""
