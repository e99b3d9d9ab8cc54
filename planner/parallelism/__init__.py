"""Which layouts an engine accepts on a GPU, and what their ranks send each other."""
