"""What an exported file says about itself: JSON values by name, the same in both formats.

Every file has ``format``, ``version`` (of this package), ``kind`` (``"classifier"``, ``"backbone"`` or ``"detector"``),
``config`` and ``dynamic`` (whether it takes images of any size). Classifiers and backbones add the fields of
:class:`~vision_longformer.classification.preprocessing.Preprocessing`: ``size``, ``mean``, ``std``, ``crop_pct``,
``interpolation`` and ``classes``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

FORMAT = "vision_longformer_export/1"


def file_metadata(kind: str, config: Mapping[str, Any], *, dynamic: bool, **details: Any) -> dict[str, Any]:
    """The metadata of a file; ``details`` are further JSON values."""
    common = {"format": FORMAT, "version": version("vision-longformer"), "kind": kind, "dynamic": dynamic}
    return {**common, "config": dict(config), **details}


def encode(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Text by name, as ONNX has it; text stays as it is, so that other programs can read it."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in metadata.items()}


def decode(texts: Mapping[str, str], path: Path) -> dict[str, Any]:
    """The inverse of :func:`encode`; a file of others is refused."""
    if texts.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by 'vil export', and does not say what its outputs mean")
    return {name: _value(text) for name, text in texts.items()}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
