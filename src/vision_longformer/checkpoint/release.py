"""The authors' released checkpoints, loaded as they are."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..models.adapt import adapt_state
from ..models.config import PAPER_TABLE_RESIZE, ModelConfig, size_pair
from ..models.vision_longformer import VisionLongformer
from .release_names import ReleaseNames, model_names, stages_of

logger = logging.getLogger(__name__)


def load_release(
    path_or_state_dict: str | Path | Mapping[str, Any],
    *,
    arch: str,
    attn_type: str = "longformerhand",
    img_size: int | tuple[int, int] = 224,
    num_classes: int | None = None,
    table_resize: str = PAPER_TABLE_RESIZE,
    **options: Any,
) -> VisionLongformer:
    """The model of a released checkpoint, in evaluation mode, with the numbers of the authors' code.

    ``arch`` and the other options are those the checkpoint was trained with, named as in the release; see
    :func:`release_config`. ``num_classes`` is the file's if None. Position tables of another size are resized, by
    default as the release does it, and logged; any other difference between file and model is an error that lists it.

    To run at high resolution, convert the full-attention stages with :func:`~vision_longformer.adapt_model`.
    """
    state = release_state(path_or_state_dict)
    if num_classes is None:
        num_classes = len(state["head.weight"]) if "head.weight" in state else 0
    if "layer1.0.proj.weight" in state:
        options.setdefault("in_chans", state["layer1.0.proj.weight"].shape[1])
    config = release_config(arch, attn_type, img_size, num_classes=num_classes, **options)
    model = VisionLongformer(config)
    translated = translate(state, model_names(config))
    adapted, report = adapt_state(translated, model, table_resize)
    if report.resized:
        logger.warning("%s", report)
    model.to(adapted["norm.weight"].dtype).load_state_dict(adapted)
    return model.eval()


def release_config(
    arch: str,
    attn_type: str = "longformerhand",
    img_size: int | tuple[int, int] = 224,
    *,
    num_classes: int = 1000,
    in_chans: int = 3,
    qkv_bias: bool = True,
    qk_scale: float | None = None,
    norm_embed: bool = True,
    avg_pool: bool = False,
    sharew: bool = True,
    share_kv: bool = True,
    only_glo: bool = False,
    sw_exact: int = 0,
    mode: int = 0,
    drop_rate: float = 0.0,
    drop_path_rate: float = 0.0,
    ln_eps: float = 1e-6,
) -> ModelConfig:
    """The configuration of a release model, with its numerics.

    ``mode``: 0 all neighbours, -1 own chunk only, above 0 random shift in training. ``ln_eps`` is accepted and has no
    effect, as in the release: every LayerNorm uses 1e-6.
    """
    if ln_eps != 1e-6:
        logger.warning("ln_eps=%g has no effect: the release ignores it and uses 1e-6", ln_eps)
    stages = stages_of(arch, attn_type, sharew=sharew, share_kv=share_kv, only_glo=only_glo, sw_exact=sw_exact)
    return ModelConfig(
        stages,
        img_size=size_pair(img_size),
        in_chans=in_chans,
        num_classes=num_classes,
        global_pool="token" if stages[-1].global_tokens and not avg_pool else "avg",
        norm_embed=norm_embed,
        qkv_bias=qkv_bias,
        qk_scale=qk_scale or None,
        drop_rate=drop_rate,
        drop_path_rate=drop_path_rate,
        patch_remainder="drop",
        neighbours="random" if mode > 0 else "self" if mode < 0 else "all",
        eval_neighbours="self" if mode < 0 else "all",
    )


def release_state(source: str | Path | Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of a release file or of a dict read from one, without ``module.`` before their names."""
    content, name = (source, "the state dict") if isinstance(source, Mapping) else (read_pth(Path(source)), str(source))
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{name} holds a {type(content).__name__}, not a dict of weights; nothing was loaded")
    if content.get("arch", "msvit") != "msvit":
        raise CheckpointError(f"{name} is a checkpoint of {content['arch']!r}, not of 'msvit'; nothing was loaded")
    state = content.get("net", content)
    if not isinstance(state, Mapping) or not state or not all(isinstance(x, Tensor) for x in state.values()):
        keys = ", ".join(map(str, list(content)[:6]))
        raise CheckpointError(f"{name} has no weights under 'net' (it has: {keys}); nothing was loaded")
    if all(key.startswith("module.") for key in state):
        return {key.removeprefix("module."): tensor for key, tensor in state.items()}
    return dict(state)


def read_pth(path: Path) -> Any:
    """What a .pth file of plain tensors holds."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is not a checkpoint of plain tensors, or is truncated or invalid; nothing was loaded"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is truncated or no checkpoint ({reason}); nothing was loaded") from error


def translate(state: Mapping[str, Tensor], names: ReleaseNames) -> dict[str, Tensor]:
    """Release tensors under our names and in our layouts; aliases must repeat what they stand for."""
    state = dict(state)
    missing, unexpected = names.all() - set(state), set(state) - names.all()
    differing = {
        alias
        for alias, canonical in names.aliases.items()
        if alias in state and canonical in state and not torch.equal(state[alias], state[canonical])
    }
    problems = []
    for what, keys in (("missing", missing), ("unexpected", unexpected), ("not shared in the file", differing)):
        if keys:
            problems.append(f"{len(keys)} {what}:\n  " + "\n  ".join(sorted(keys)))
    if problems:
        raise CheckpointError(
            "the checkpoint does not match the model described by arch, attn_type and options; nothing was loaded\n"
            + "\n".join(problems)
        )
    return {ours: source.read(state) for ours, source in names.sources.items()}
