"""Several scenarios on one stock of GPUs."""
