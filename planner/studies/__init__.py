"""What each chapter of the walk looks at, as tables and sentences."""
