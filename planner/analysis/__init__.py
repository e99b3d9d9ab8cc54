"""Tables and sentences about a plan."""
