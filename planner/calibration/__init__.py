"""From measurements to coefficients, and validation against measurements."""
