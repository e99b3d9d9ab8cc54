"""Optional companions of the planner; none imports another."""
