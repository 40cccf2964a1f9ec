"""From a recipe to its data."""

from __future__ import annotations

from ...config import ModelConfig
from ..preprocessing import Preprocessing
from ..preprocessing import preprocessing as recipe_preprocessing
from ..recipe import ClassificationRecipe
from .arrays import ArraySource
from .contract import EvalData, Process, TrainData
from .in_memory import InMemoryTrainData
from .random_access import RandomAccessEvalData, RandomAccessTrainData
from .source import Source, open_source
from .streaming import StreamingEvalData, StreamingTrainData

ALONE = Process()


def train_data(
    recipe: ClassificationRecipe,
    config: ModelConfig,
    preprocessing: Preprocessing | None = None,
    process: Process = ALONE,
) -> TrainData:
    """The training split, for one of the processes; ``preprocessing`` is the recipe's by default."""
    source = None if _is_streamed(recipe) else open_source(recipe, recipe.train_split)
    if preprocessing is None:
        preprocessing = recipe_preprocessing(recipe, config, source.classes if source else class_names(recipe))
    if source is None:
        return StreamingTrainData(recipe, preprocessing, process)
    if not recipe.in_memory:
        return RandomAccessTrainData(source, recipe, preprocessing, process)
    return InMemoryTrainData(_arrays(source, recipe), recipe, preprocessing, process)


def eval_data(recipe: ClassificationRecipe, preprocessing: Preprocessing, process: Process = ALONE) -> EvalData:
    """The evaluation split, for one of the processes; its classes must be those of ``preprocessing``."""
    if _is_streamed(recipe):
        return StreamingEvalData(recipe, preprocessing, process)
    source = open_source(recipe, recipe.eval_split, preprocessing.classes)
    return RandomAccessEvalData(source, recipe, preprocessing, process)


def class_names(recipe: ClassificationRecipe) -> tuple[str, ...]:
    """The classes of the training split; numbers, where the data does not name them."""
    if not _is_streamed(recipe):
        return open_source(recipe, recipe.train_split).classes
    if recipe.num_classes is None:
        raise ValueError(f"{recipe.data} is streamed; say how many classes there are: num_classes")
    return tuple(map(str, range(recipe.num_classes)))


def _is_streamed(recipe: ClassificationRecipe) -> bool:
    if recipe.data.startswith("wds/") and recipe.in_memory:
        raise ValueError("in_memory is for arrays; streamed shards cannot be kept in memory")
    return recipe.data.startswith("wds/")


def _arrays(source: Source, recipe: ClassificationRecipe) -> ArraySource:
    if not isinstance(source, ArraySource):
        raise ValueError(f"in_memory is for arrays (.npz files, fashion-mnist, torch/cifar10 …), not for {recipe.data}")
    return source
