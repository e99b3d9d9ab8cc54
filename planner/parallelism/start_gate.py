"""One gate for plans, searches, remedies and commands: what is known not to start, and why."""

from planner.engines.deployment import Deployment
from planner.engines.engine import Engine, explain_unsupported_gpu
from planner.engines.model_support import (
    explain_unsupported_attention,
    explain_unsupported_format,
    judge_model_support,
)
from planner.hardware.gpus import Gpu
from planner.models.registry import Model
from planner.parallelism.layouts import explain_illegal_layout


def explain_refused_model(model: Model, gpu: Gpu, engine: Engine) -> str | None:
    """Explain in a sentence why the engine does not start the model on a GPU; None if it may.

    The release has to run on the GPU and to know the model's class; each of its weight formats and its
    attention need kernels for the GPU.
    """
    if reason := explain_unsupported_gpu(gpu, engine):
        return reason
    if (support := judge_model_support(model, engine)).state == "refused":
        return support.sentence
    methods = dict.fromkeys(scheme.method for _, scheme in model.quantization.schemes)
    reasons = (explain_unsupported_format(method, gpu, engine) for method in methods)
    return next(filter(None, reasons), explain_unsupported_attention(model, gpu, engine)) or None


def explain_refused_start(deployment: Deployment) -> str | None:
    """Explain in a sentence why a deployment does not start, memory aside; None if it may.

    Its memory plan (`can_start`) has what memory refuses, blocks of recurrent states included;
    `deploy_on` refuses arguments.
    """
    model, engine, layout = deployment.model, deployment.engine, deployment.layout
    node = max(deployment.gpus_per_node, layout.tp)
    refusal = explain_refused_model(model, deployment.gpu, engine)
    return refusal or explain_illegal_layout(model, layout, node, engine)
