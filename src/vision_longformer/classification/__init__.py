"""Image classification: train, evaluate and predict, as the commands of the same names do."""

from .evaluate import evaluate
from .predict import Prediction, predict
from .recipe import ClassificationRecipe
from .train import Trained, resume, train

__all__ = ["ClassificationRecipe", "Prediction", "Trained", "evaluate", "predict", "resume", "train"]
