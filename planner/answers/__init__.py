"""The answer to a scenario: everything that anybody is told of a plan, each figure once."""

from planner.answers.answer import Answer, Offer, build_answer
from planner.answers.serialization import serialize_answer
from planner.latency.performance import Performance

__all__ = ["Answer", "Offer", "Performance", "build_answer", "serialize_answer"]
