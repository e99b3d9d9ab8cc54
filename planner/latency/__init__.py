"""What a step costs: its work, the calibrated speed of a GPU, speculation; and what a performance is."""
