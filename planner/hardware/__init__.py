"""GPUs, links and prices."""
