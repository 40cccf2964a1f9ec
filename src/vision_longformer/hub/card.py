"""The model card: what the checkpoint and its run say of the model, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .about import About
from .run_facts import RunFacts

MOST_LABELS = 100
"""Labels that a card lists; more are in ``config.json``."""

METRICS = {"image-classification": ("top1", "accuracy"), "object-detection": ("box_AP", "map")}
"""By task, the measure that goes into the card's header, and what the hub calls it."""


def model_card(name: str, about: About, run: RunFacts | None, license: str | None) -> ModelCard:
    """The card of a model; ``run`` is None if nothing is known of its training, and so may the ``license`` be."""
    header = ModelCardData(
        license=license,
        library_name="vision-longformer",
        pipeline_tag=about.task,
        tags=["vision-longformer", about.task],
        datasets=None if run is None else [_data_set(run.data)],
        **_results(name, about.task, run),
    )
    sections = [f"# {name}", about.summary, _table(about.facts), *_labels(about), _use(about)]
    if run is not None:
        sections += [_training(run), *_evaluation(run)]
    return ModelCard(f"---\n{header}\n---\n\n" + "\n\n".join(sections) + "\n")


def _data_set(data: str) -> str:
    """A data set's name as the hub may know it: ``hfds/owner/name``, ``torch/cifar10`` or ``garments:320`` cut down."""
    return data.removeprefix("hfds/").removeprefix("torch/").partition(":")[0]


def _results(name: str, task: str, run: RunFacts | None) -> dict[str, Any]:
    """The main measure, in the form that the hub shows beside a model."""
    key, metric = METRICS.get(task, ("", ""))
    if run is None or key not in run.evaluation:
        return {}
    result = EvalResult(
        task_type=task,
        dataset_type=_data_set(run.data),
        dataset_name=run.data,
        dataset_split=run.eval_split,
        metric_type=metric,
        metric_name=key,
        metric_value=run.evaluation[key],
    )
    return {"metrics": [metric], "eval_results": [result], "model_name": name}


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _labels(about: About) -> list[str]:
    if not about.labels:
        return []
    shown = ", ".join(about.labels) if len(about.labels) <= MOST_LABELS else "`label_names` in `config.json`"
    return [f"Classes: {shown}."]


def _use(about: About) -> str:
    blocks = [f"```{language}\n{code}\n```" for language, code in about.use.items()]
    where = "`FOLDER` is this folder, or `hf-hub:OWNER/NAME` when it is on the Hugging Face Hub."
    return "\n\n".join(["## Use", where, *blocks])


def _training(run: RunFacts) -> str:
    with_ = ", ".join(f"{name} {version}" for name, version in run.packages.items())
    return (
        f"## Data and recipe\n\nTrained on `{run.data}`, split `{run.train_split}`, with {with_}. "
        f"What the recipe changes of the defaults:\n\n```yaml\n{run.recipe.rstrip()}\n```"
    )


def _evaluation(run: RunFacts) -> list[str]:
    measured = {name: f"{value:.4g}" for name, value in run.evaluation.items() if not isnan(value)}
    return [f"## Results\n\nOn `{run.data}`, split `{run.eval_split}`:\n\n{_table(measured)}"] if measured else []
