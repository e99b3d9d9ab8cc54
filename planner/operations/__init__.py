"""From a plan to files, and from measurements back to the plan."""
