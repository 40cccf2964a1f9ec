"""Image classification: train, evaluate and predict, as the commands of the same names do."""

from ..training.run import Trained
from .evaluate import evaluate
from .predict import Prediction, predict
from .recipe import ClassificationRecipe
from .task import resume, train

__all__ = ["ClassificationRecipe", "Prediction", "Trained", "evaluate", "predict", "resume", "train"]
