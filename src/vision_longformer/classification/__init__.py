"""Image classification: train, evaluate and predict, as the commands of the same names do."""

from ..training.run import TrainedRun
from .evaluate import evaluate
from .predict import Prediction, predict
from .recipe import ClassificationRecipe
from .task import resume, train

__all__ = ["ClassificationRecipe", "Prediction", "TrainedRun", "evaluate", "predict", "resume", "train"]
