"""``vil cost``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .output import billions, millions, print_json, print_line, print_table, size_text
from .parser import Size

if TYPE_CHECKING:
    from ..costs import ModelMacs


def cost(model: str, *, size: Size | None = None, implementation: str = "auto", json: bool = False) -> None:
    """Show what a model costs, stage by stage: MACs as the paper counts them and as executed.

    Args:
        model: a name from 'vil models'.
        size: image size as 480x640, or one number for a square; the model's own by default.
        implementation: how to compute local attention; 'vil doctor' lists the names.
        json: print JSON.
    """
    from ..costs import count_parameters, executed_macs, paper_macs
    from ..models.zoo import model_config

    config = model_config(model)
    image = config.img_size if size is None else size
    params = count_parameters(config)
    paper, executed = paper_macs(config, image), executed_macs(config, image, implementation)
    if json:
        counts = {"params": params.paper, "trainable_params": params.trainable}
        executed_data = {"implementation": implementation, **_plain(executed)}
        print_json({"model": model, "size": image, **counts, "paper": _plain(paper), "executed": executed_data})
        return
    print_line(f"{model}, image of {size_text(image)}")
    fixed = f", of which {millions(params.random_features)} M random features" if params.random_features else ""
    print_line(f"parameters: {millions(params.paper)} M{fixed}")
    _print_macs("GMACs as the paper counts", paper)
    _print_macs(f"GMACs executed ({implementation})", executed)


def _plain(macs: ModelMacs) -> dict[str, Any]:
    stages = [{"map": stage.grid, **stage.parts, "total": stage.total} for stage in macs.stages]
    return {"stages": stages, "head": macs.head, "total": macs.total}


def _print_macs(title: str, macs: ModelMacs) -> None:
    """One row per stage, one column per part that occurs."""
    parts = [part for part in macs.stages[0].parts if any(stage.parts[part] for stage in macs.stages)]
    rows = []
    for number, stage in enumerate(macs.stages, 1):
        counts = [billions(stage.parts[part]) for part in parts]
        rows.append([f"stage {number}", size_text(stage.grid), *counts, billions(stage.total)])
    blank = [""] * len(parts)
    rows.append(["head", "", *blank, billions(macs.head)])
    rows.append(["total", "", *blank, billions(macs.total)])
    print_table(title, ["", "map", *(part.replace("_", " ") for part in parts), "total"], rows)
