"""From a scenario to the deployment to run."""
