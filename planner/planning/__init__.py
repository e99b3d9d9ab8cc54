"""From a scenario to a plan."""
