"""The engine: a Pipeline trains a model on real processes, in the order of a schedule."""

from pipelab.engine.pipeline import Pipeline
from pipelab.engine.result import StepResult

__all__ = ["Pipeline", "StepResult"]
