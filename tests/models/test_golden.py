"""Agreement with the authors' release to 1e-9 in float64, on golden cases.

The cases are read from ``VIL_GOLDEN_DIR`` if it is set (same layout), so that further ones can be run as they are.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vision_longformer import load_release
from vision_longformer.checkpoint.release import translate
from vision_longformer.checkpoint.release_names import RULES, attention_names, model_names
from vision_longformer.geometry import Grid
from vision_longformer.models import config as cfg
from vision_longformer.models.attention import build_attention

GOLDEN = Path(os.environ.get("VIL_GOLDEN_DIR", Path(__file__).parents[1] / "assets" / "golden"))
TOLERANCE = 1e-9


def _cases(folder: str, entry: str) -> list[Any]:
    cases = json.loads((GOLDEN / folder / "index.json").read_text())[entry]
    return [pytest.param(case, id=case["file"].removesuffix(".npz")) for case in cases]


def _arrays(folder: str, case: dict[str, Any]) -> dict[str, Tensor]:
    with np.load(GOLDEN / folder / case["file"]) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def _stage(case: dict[str, Any]) -> cfg.StageConfig:
    """The stage whose attention is the golden module."""
    options, cls = case["kwargs"], case["cls"]
    attention: cfg.AttentionConfig
    if cls == "Attention":
        attention = cfg.Full()
    elif cls == "LinformerSelfAttention":
        attention = cfg.Linformer(options["num_feats"], options["share_kv"])
    elif cls == "SRSelfAttention":
        attention = cfg.SpatialReduction(options["rratio"])
    elif cls == "PerformerSelfAttention":
        kernel = (
            "relu" if options.get("generalized_attention") else "linear" if options.get("no_projection") else "softmax"
        )
        attention = cfg.Performer(options["nb_features"], kernel, stabiliser="batch")
    elif options["only_glo"]:
        attention = cfg.GlobalMemory(options["sharew"], bias_local_queries=False)
    else:
        attention = cfg.Longformer(options["w"], RULES[options["exact"]], options["sharew"])
    position = "relative" if options.get("rpe") else "none"
    return cfg.StageConfig(options["dim"], 1, options["num_heads"], 1, attention, case["nglo"], position)


def _neighbours(case: dict[str, Any]) -> str | Tensor:
    if case["forced_mode"] is not None:
        return torch.tensor(case["forced_mode"])
    return "self" if case["kwargs"].get("mode") == -1 else "all"


@pytest.mark.parametrize("case", _cases("attention", "cases"))
def test_attention(case: dict[str, Any]) -> None:
    """Output, input gradient and every parameter gradient of one module."""
    arrays = _arrays("attention", case)
    stage, grid, options = _stage(case), Grid(case["nx"], case["ny"]), case["kwargs"]
    attention = build_attention(stage, grid, qkv_bias=options["qkv_bias"], scale=options.get("qk_scale")).double()
    attention.train(case["train"])

    names = attention_names(stage, grid, options["qkv_bias"])
    weights = {key.split("/", 1)[1]: value for key, value in arrays.items() if key.startswith(("param/", "buffer/"))}
    for alias, canonical in names.aliases.items():
        weights.setdefault(alias, weights[canonical])
    weights = {**dict.fromkeys(names.derived, torch.zeros(0)), **weights}
    attention.load_state_dict(translate(weights, names))

    x = arrays["x"].requires_grad_()
    out = attention(x, grid, _neighbours(case))
    torch.testing.assert_close(out, arrays["out"], atol=TOLERANCE, rtol=TOLERANCE)
    parameters = dict(attention.named_parameters())
    used = {name: p for name, p in parameters.items() if p.numel()}
    grads = torch.autograd.grad(out, [x, *used.values()], arrays["cotangent"], allow_unused=True)
    torch.testing.assert_close(grads[0], arrays["grad_x"], atol=TOLERANCE, rtol=TOLERANCE)

    golden = {key.removeprefix("grad/"): value for key, value in arrays.items() if key.startswith("grad/")}
    golden = {**{part: torch.zeros_like(weights[part]) for part in names.all() if part in weights}, **golden}
    for (name, parameter), grad in zip(used.items(), grads[1:], strict=True):
        expected = names.sources[name].read(golden)
        actual = torch.zeros_like(parameter) if grad is None else grad
        torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("case", _cases("models", "models"))
def test_model(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, stage maps, global tokens, input gradient and the norm of every parameter gradient of a model."""
    arrays = _arrays("models", case)
    state = {key.removeprefix("state/"): value for key, value in arrays.items() if key.startswith("state/")}
    model = load_release(state, **case["args"]).train(case["train"])
    if case["forced_mode"] is not None:
        forced = torch.tensor(case["forced_mode"])
        monkeypatch.setattr(model.random_shift, "draw", lambda layers: forced.expand(layers))

    x = arrays["x"].requires_grad_()
    logits = model(x)
    torch.testing.assert_close(logits, arrays["logits"], atol=TOLERANCE, rtol=TOLERANCE)
    pooled = model.forward_head(model.forward_features(x), pre_logits=True)
    torch.testing.assert_close(pooled, arrays["pooled"], atol=TOLERANCE, rtol=TOLERANCE)
    (grad_x,) = torch.autograd.grad(logits, x, arrays["cotangent"])
    torch.testing.assert_close(grad_x, arrays["grad_x"], atol=TOLERANCE, rtol=TOLERANCE)

    maps = model.forward_intermediates(x, intermediates_only=True)
    assert len(maps) == len(case["stage_shapes"])
    for number, features in enumerate(maps, 1):
        torch.testing.assert_close(features, arrays[f"stage{number}"], atol=TOLERANCE, rtol=TOLERANCE)
    for number, (tokens, grid) in model._run_stages(x, None, set(range(len(maps)))).items():
        rows = tokens[:, : tokens.shape[1] - grid.tokens]
        if f"stage{number + 1}_global" in arrays:
            torch.testing.assert_close(rows, arrays[f"stage{number + 1}_global"], atol=TOLERANCE, rtol=TOLERANCE)

    norms = case["param_grad_norms"]
    grads = torch.autograd.grad(model(x), list(model.parameters()), arrays["cotangent"], allow_unused=True)
    compared = set()
    for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
        parts = model_names(model.config).sources[name].parts
        if any(part in compared or part not in norms or "g2l" in part for part in parts):
            continue
        compared.update(parts)
        actual = 0.0 if grad is None else float(grad.norm())
        assert actual == pytest.approx(sum(norms[part] ** 2 for part in parts) ** 0.5, rel=1e-9, abs=1e-9), name
    assert len(compared) > 0.8 * len(norms)
