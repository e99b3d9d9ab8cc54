"""What people meet: the command, notebooks, charts and the report."""
