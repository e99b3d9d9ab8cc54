"""Write the files that start, monitor and benchmark a plan."""

from planner.deploy.artifacts import (
    ALL_ARTIFACT_FILES,
    list_artifact_files,
    predict_benchmark_ramp,
    render_artifacts,
)
from planner.deploy.launch_spec import (
    LaunchSpec,
    build_deployment_launch,
    build_launch,
    build_launches,
)

__all__ = [
    "ALL_ARTIFACT_FILES",
    "LaunchSpec",
    "build_deployment_launch",
    "build_launch",
    "build_launches",
    "list_artifact_files",
    "predict_benchmark_ramp",
    "render_artifacts",
]
