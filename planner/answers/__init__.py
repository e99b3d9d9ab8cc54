"""The answer to a scenario: everything that anybody is told of a plan, as numbers, names and reasons."""

from planner.answers.answer import (
    FILE_PARTS,
    MEMO_PARTS,
    SUMMARY_PARTS,
    Answer,
    Offer,
    Part,
)
from planner.answers.build import build_answer
from planner.answers.serialization import serialize_answer
from planner.latency.performance import Performance

__all__ = [
    "FILE_PARTS",
    "MEMO_PARTS",
    "SUMMARY_PARTS",
    "Answer",
    "Offer",
    "Part",
    "Performance",
    "build_answer",
    "serialize_answer",
]
