"""The model card and ``config.json`` of a folder: what a checkpoint and its run say of the model, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..checkpoint.native import DETECTOR, HUB, Description
from ..costs import count_parameters, paper_macs
from ..data.split import Split
from ..models.config import ModelConfig
from ..models.timm_registry import data_config
from ..models.zoo import describe_model, model_changes, nearest_model
from ..training.recipe import recipe_names, resolve, to_yaml
from ..training.run_directory import ENVIRONMENT, RECIPE, RunDirectory
from ..training.task import TrainingTask

MOST_LABELS = 100
"""Labels that a card lists; more are in ``config.json``."""

METRICS = {"image-classification": ("top1", "accuracy"), "object-detection": ("box_AP", "map")}
"""By task, the result that goes into the card's header, and what the hub calls it."""


def model_card(name: str, model: ModelFacts, run: RunFacts | None, license: str | None) -> ModelCard:
    """The card of a model; ``run`` is None if nothing is known of its training, and so may the ``license`` be."""
    header = ModelCardData(
        license=license,
        library_name="vision-longformer",
        pipeline_tag=model.task,
        tags=["vision-longformer", model.task],
        datasets=None if run is None else [_dataset_name(run.data)],
        **_header_results(name, model.task, run),
    )
    sections = [f"# {name}", model.summary, _table(model.facts), *_labels(model), _usage(model)]
    if run is not None:
        sections += [_training(run), *_evaluation(run)]
    return ModelCard(f"---\n{header}\n---\n\n" + "\n\n".join(sections) + "\n")


def _dataset_name(data: str) -> str:
    """A data set's name as the hub may know it: ``hfds/owner/name``, ``torch/cifar10`` or ``garments:320`` cut down."""
    return data.removeprefix("hfds/").removeprefix("torch/").partition(":")[0]


def _header_results(name: str, task: str, run: RunFacts | None) -> dict[str, Any]:
    """The main result, in the form that the hub shows beside a model."""
    key, metric = METRICS.get(task, ("", ""))
    if run is None or key not in run.evaluation:
        return {}
    result = EvalResult(
        task_type=task,
        dataset_type=_dataset_name(run.data),
        dataset_name=run.data,
        dataset_split=run.evaluated_on.removeprefix("split ").strip("`"),
        metric_type=metric,
        metric_name=key,
        metric_value=run.evaluation[key],
    )
    return {"metrics": [metric], "eval_results": [result], "model_name": name}


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _labels(model: ModelFacts) -> list[str]:
    if not model.labels:
        return []
    labels = ", ".join(model.labels) if len(model.labels) <= MOST_LABELS else "`label_names` in `config.json`"
    return [f"Classes: {labels}."]


def _usage(model: ModelFacts) -> str:
    blocks = [f"```{language}\n{code}\n```" for language, code in model.usage.items()]
    where = "`FOLDER` is this folder, or `hf-hub:OWNER/NAME` when it is on the Hugging Face Hub."
    return "\n\n".join(["## Use", where, *blocks])


def _training(run: RunFacts) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in run.packages.items())
    shipped = ""
    if run.shipped is not None:
        name, about = run.shipped
        shipped = f"Trained with recipe `{name}` (“{about}”, which describes the recipe, not this model). "
    return (
        f"## Data and recipe\n\n{shipped}Trained on `{run.data}`, {run.trained_on}, with {packages}. "
        f"Settings that differ from the defaults:\n\n```yaml\n{run.recipe.rstrip()}\n```"
    )


def _evaluation(run: RunFacts) -> list[str]:
    results = {name: f"{value:.4g}" for name, value in run.evaluation.items()}
    return [f"## Results\n\nOn `{run.data}`, {run.evaluated_on}:\n\n{_table(results)}"] if results else []


# The model


@dataclass(frozen=True)
class ModelFacts:
    """A model in words: ``task`` as the hub calls it, ``facts`` as rows of a table, ``usage`` as code by language.

    ``config`` is the content of ``config.json``.
    """

    task: str
    summary: str
    facts: dict[str, str]
    labels: tuple[str, ...]
    usage: dict[str, str]
    config: dict[str, Any]


def model_facts(description: Description) -> ModelFacts:
    """The model of a classifier's or a detector's file."""
    of = _detector_facts if description.format == DETECTOR else _classifier_facts
    return of(description.config, description.info)


def _classifier_facts(data: Mapping[str, Any], info: Mapping[str, Any]) -> ModelFacts:
    config = ModelConfig.from_dict(data)
    plain = timm_config(config, info)
    prepared = plain["pretrained_cfg"]
    facts = {
        "architecture": describe_model(plain["architecture"], config),
        "parameters": f"{count_parameters(config).trainable / 1e6:.2f} M",
        f"multiply-accumulates of an image of {_by(config.img_size)}": f"{paper_macs(config).total / 1e6:,.1f} M",
        "input": f"{config.in_chans} × {_by(prepared['input_size'][1:])}",
        "mean, standard deviation": f"{_numbers(prepared['mean'])}; {_numbers(prepared['std'])}",
        "resizing": f"{prepared['interpolation']}, then the centre {prepared['crop_pct']:.1%} of the shorter side",
    }
    usage = {
        "bash": "vil predict FOLDER IMAGE\nvil evaluate FOLDER --data DATA",
        "python": (
            "import timm\n"
            "from vision_longformer.hub import from_pretrained  # makes timm know our models, too\n\n"
            'model = from_pretrained("FOLDER")\n'
            'same = timm.create_model("local-dir:FOLDER", pretrained=True).eval()  # or "hf-hub:OWNER/NAME"'
        ),
    }
    if not config.num_classes:
        del usage["bash"]
        return ModelFacts("image-feature-extraction", "A Vision Longformer without a head.", facts, (), usage, plain)
    summary = f"A Vision Longformer that classifies images into {config.num_classes} classes."
    labels = tuple(plain.get("label_names", ()))
    return ModelFacts("image-classification", summary, facts, labels, usage, plain)


def _detector_facts(data: Mapping[str, Any], info: Mapping[str, Any]) -> ModelFacts:
    from ..detection import DetectorConfig, build_detector

    config = DetectorConfig.from_dict(data)
    labels = tuple(str(category["name"]) for category in info.get("categories", ()))
    name, results = {"retinanet": ("RetinaNet", "boxes"), "mask_rcnn": ("Mask R-CNN", "boxes and masks")}[config.kind]
    parameters = sum(parameter.numel() for parameter in build_detector(config).parameters())
    facts = {
        "backbone": config.backbone_in_words,
        "parameters": f"{parameters / 1e6:.2f} M",
        "input": f"shorter side {config.min_sizes[-1]}, longer side at most {config.max_size}",
    }
    usage = {
        "bash": "vil detect predict FOLDER IMAGE\nvil detect evaluate FOLDER --data DATA",
        "python": 'from vision_longformer.hub import from_pretrained\n\nmodel = from_pretrained("FOLDER")',
    }
    classes = "one class" if config.num_classes == 1 else f"{config.num_classes} classes"
    summary = f"A {name} on a Vision Longformer that detects objects of {classes}, with {results}."
    plain = {"detector": config.to_dict(), "label_names": labels}
    return ModelFacts("object-detection", summary, facts, labels, usage, plain)


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}×{size[1]}"


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)


# The model as timm knows it


def timm_config(config: ModelConfig, info: Mapping[str, Any]) -> dict[str, Any]:
    """The ``config.json`` for ``timm.create_model("local-dir:FOLDER", pretrained=True)``.

    It names a registered model, what to change of it, and how images are prepared. ``info`` is that of the checkpoint;
    without preprocessing in it, images are prepared as for ImageNet.
    """
    name = nearest_model(config)
    prepared = dict(info.get("preprocessing", {}))
    classes = prepared.pop("classes", None)
    size = prepared.pop("size", config.img_size)
    pretrained = {**data_config(config), **prepared, "input_size": (config.in_chans, *size)}
    if config.in_chans != 3:  # what timm knows to fit to other channels are weights for three
        del pretrained["first_conv"]
    return {
        "architecture": name,
        "num_classes": config.num_classes,
        "num_features": config.stages[-1].dim,
        "model_args": model_changes(name, config),  # timm has its own for classes
        **({} if classes is None else {"label_names": classes}),
        "pretrained_cfg": pretrained,
    }


# The run


@dataclass(frozen=True)
class RunFacts:
    """What a run directory says about a checkpoint in it.

    ``trained_on`` and ``evaluated_on`` are parts of the data in words: splits by their names, or what was held out.
    ``recipe`` is the YAML of what differs from the defaults; ``shipped`` the name of the shipped recipe that it is and
    what that is about, None if it is another; ``evaluation`` is empty if none is known to belong.
    """

    data: str
    trained_on: str
    evaluated_on: str
    recipe: str
    shipped: tuple[str, str] | None
    packages: dict[str, str]
    evaluation: dict[str, float]


def run_facts(checkpoint: Path, format: str) -> RunFacts | None:
    """The facts of the run that ``checkpoint`` lies in; None if it lies in none."""
    folder = checkpoint.parent
    if not (folder / RECIPE).is_file():
        return None
    task = _task_type(format)
    recipe: Any = resolve(task.recipe_type, str(folder / RECIPE))
    data = _public(recipe.data)
    about, shipped = _about(recipe)
    yaml = to_yaml(
        replace(recipe, about=about, data=data, init=recipe.init and _public(recipe.init)), changed_only=True
    )
    packages = json.loads((folder / ENVIRONMENT).read_text())["packages"]
    evaluation = _run_evaluation(RunDirectory(folder), checkpoint.stem, task.best_metric)
    return RunFacts(data, *_parts(recipe, Split.read(folder)), yaml, shipped, packages, evaluation)


def _parts(recipe: Any, split: Split | None) -> tuple[str, str]:
    """What a run was trained and evaluated on, in words."""
    if split is None:
        return f"split `{recipe.train_split}`", f"split `{recipe.eval_split}`"
    share = len(split.evaluation) / (len(split.train) + len(split.evaluation))
    return f"{1 - share:.0%} of the images", f"{share:.0%} of the images, held out"


ABOUT_THE_PLACE = ("init", "workers", "checkpoint_minutes", "log_every")
"""Settings that may differ from those of a recipe without making another one of it; data may be in another folder."""


def _about(recipe: Any) -> tuple[str, tuple[str, str] | None]:
    """What a run is about in its user's own words, and the name of the shipped recipe that it followed, with its words.

    The words of a shipped recipe are not those of a run that has changed any of its settings.
    """
    recipes = {name: resolve(type(recipe), name) for name in recipe_names(type(recipe))}
    own = replace(recipe, data=_public(recipe.data))
    for name, shipped in recipes.items():
        if replace(shipped, **{key: getattr(recipe, key) for key in ABOUT_THE_PLACE}) == own:
            return "", (name, shipped.about)
    return "" if recipe.about in {shipped.about for shipped in recipes.values()} else recipe.about, None


def _task_type(format: str) -> type[TrainingTask]:
    """The training task whose checkpoints have this format."""
    if format == DETECTOR:
        from ..detection.task import DetectionTask

        return DetectionTask
    from ..classification.task import ClassificationTask

    return ClassificationTask


def _public(path: str) -> str:
    """A path or a data set such as ``torch/cifar10:/data`` without the folders of this machine; other names as is."""
    if path.startswith(("hfds/", HUB)):
        return path
    if path.startswith("torch/"):
        return path.partition(":")[0]
    kind = "wds/" if path.startswith("wds/") else ""
    return kind + Path(path.removeprefix(kind)).name


def _run_evaluation(run: RunDirectory, name: str, score: str) -> dict[str, float]:
    """The evaluation of the ``best`` or the ``last`` checkpoint, without results that are not numbers.

    Of other checkpoints it is not known. The best has the highest ``score``; of equal ones, the first was saved.
    """
    evaluations = [_numeric(record["evaluation"]) for record in run.records() if "evaluation" in record]
    if not evaluations or name not in ("best", "last"):
        return {}
    scored = [evaluation for evaluation in evaluations if score in evaluation]
    return max(scored, key=lambda evaluation: evaluation[score]) if name == "best" and scored else evaluations[-1]


def _numeric(results: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in results.items() if value is not None and not isnan(value)}
