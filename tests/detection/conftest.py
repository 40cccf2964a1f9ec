"""Small models among those of the zoo: four stages, strides 4 to 32, made for images of 64×64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import SMALL_MODELS

from vision_longformer.models import zoo


@pytest.fixture(autouse=True, scope="module")
def _small_backbones() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("vil", "vil_ape"):
            patch.setitem(zoo.MODELS, name, SMALL_MODELS[name])
        yield
