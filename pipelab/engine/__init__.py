"""The engine: a Pipeline trains a model on real processes, in the order of a schedule."""

from pipelab.engine.pipeline import Pipeline
from pipelab.engine.result import StepResult
from pipelab.engine.tuning import tune_microbatches

__all__ = ["Pipeline", "StepResult", "tune_microbatches"]
