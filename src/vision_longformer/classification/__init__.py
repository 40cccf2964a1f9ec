"""Image classification: train, evaluate and predict, as the commands of the same names do."""

from typing import TYPE_CHECKING

from ..lazy import lazy_exports

if TYPE_CHECKING:
    from ..training.run import TrainedRun
    from .evaluate import evaluate
    from .predict import Prediction, predict
    from .recipe import ClassificationRecipe
    from .task import resume, train

__all__ = ["ClassificationRecipe", "Prediction", "TrainedRun", "evaluate", "predict", "resume", "train"]

lazy_exports(
    __name__,
    {
        "..training.run": ["TrainedRun"],
        ".evaluate": ["evaluate"],
        ".predict": ["Prediction", "predict"],
        ".recipe": ["ClassificationRecipe"],
        ".task": ["resume", "train"],
    },
)
