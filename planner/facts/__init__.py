"""What else exists: GPUs, prices, engines and their versions, traffic, deployments."""
