"""How the commands of the documentation run in a test: the only place where they differ from what is printed.

``FILES`` are made when a command or a Python block first mentions them and nothing before it has written them.
``SHORTER`` is for what would take long or needs data that are not here. ``NOT_RUN`` is left out, with the reason.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from builders import SMALL_DETECTOR, write_garments
from docs_pages import ROOT
from PIL import Image

from vision_longformer import create_model, save
from vision_longformer.classification import train
from vision_longformer.data.sources import fashion_mnist
from vision_longformer.detection import DetectorConfig, build_detector, save_detector
from vision_longformer.detection.dataset import open_detection

PHOTOS = ROOT / "src/vision_longformer/assets/photos"


def _photo(path: Path) -> None:
    shutil.copy(min(PHOTOS.glob("*.jpg")), path)


def _quickstart(path: Path) -> None:
    train("quickstart", output=path, steps=1)


def _image_folder(path: Path) -> None:
    """Two classes of images, as ImageNet's folders are; as many as a batch of the paper's recipes has."""
    pixels = np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)
    for split, count in (("train", 512), ("validation", 2)):
        for name in ("n01440764", "n01443537"):
            folder = path / split / name
            folder.mkdir(parents=True)
            Image.fromarray(pixels).save(folder / "0.jpg")
            for number in range(1, count):
                shutil.copy(folder / "0.jpg", folder / f"{number}.jpg")


def _small_arrays(path: Path) -> None:
    """32 images of 32×32 and ten classes in each split."""
    generator = np.random.default_rng(0)
    images, labels = generator.integers(0, 255, (32, 32, 32, 3), dtype=np.uint8), np.arange(32) % 10
    np.savez(path, train_x=images, train_y=labels, validation_x=images, validation_y=labels)


def _released(path: Path) -> None:
    """Random weights under the names and shapes of the authors' ViL-Small, shared ones shared."""
    keys = json.loads(gzip.decompress((ROOT / "tests/assets/checkpoint_keys.json.gz").read_bytes()))
    entry = keys["models"]["vil_small_rpb_224"]
    types = {name: getattr(torch, dtype) for name, dtype in entry["buffers"].items()}
    state = {name: torch.zeros(shape, dtype=types.get(name)) for name, shape in entry["keys"].items()}
    torch.save({"net": {name: state[entry["shared"].get(name, name)] for name in state}, "arch": "msvit"}, path)


def _classifier(path: Path) -> None:
    save(create_model("vision_longformer_tiny", num_classes=2), path)


def _trees(path: Path) -> None:
    path.mkdir()
    write_garments(path, ("train", 2), ("validation", 2))


def _shelf(path: Path) -> None:
    """Eight images with masks, not split."""
    path.mkdir()
    write_garments(path, ("train", 8))
    (path / "annotations" / "instances_train.json").rename(path / "annotations.json")
    (path / "train").rename(path / "images")


def _trees_run(path: Path) -> None:
    """The best detector of a run: an untrained Mask R-CNN for what is in ``data/trees``."""
    names = [category.name for category in open_detection("garments", "validation").categories]
    model = build_detector(DetectorConfig("mask_rcnn", "vision_longformer_tiny", len(names), **SMALL_DETECTOR))
    save_detector(
        model,
        path / "best.safetensors",
        info={"categories": [{"id": n, "name": name} for n, name in enumerate(names, 1)]},
    )


def _annotated(path: Path) -> None:
    """A photo, and the box of one object in it, in Pascal VOC's form."""
    path.mkdir()
    _photo(path / "1.jpg")
    box = "<xmin>10</xmin><ymin>20</ymin><xmax>90</xmax><ymax>80</ymax>"
    tree = f"<object><name>tree</name><bndbox>{box}</bndbox></object>"
    (path / "1.xml").write_text(f"<annotation><filename>1.jpg</filename>{tree}</annotation>")


def _own_photos(path: Path) -> None:
    """Sixteen images of each of three garments, in as many formats, and a file that is no image."""
    garments = fashion_mnist("train")
    for label in range(3):
        folder = path / garments.classes[label].replace("/", "-")
        folder.mkdir(parents=True)
        chosen = np.flatnonzero(garments.labels == label)[:16]
        for index, extension in zip(chosen, cycle(("png", "webp", "gif", "jpg"))):
            Image.fromarray(garments.images[index]).resize((96, 96)).save(folder / f"{index}.{extension}")
    (path / "notes.txt").write_text("not an image")


FILES: dict[str, Callable[[Path], None]] = {
    "photo.jpg": _photo,
    "my_photos": _own_photos,
    "runs/quickstart-1": _quickstart,
    "data/imagenet": _image_folder,
    "cifar10.npz": _small_arrays,
    "released.pth": _released,
    "imagenet21k_base.safetensors": _classifier,
    "data/trees": _trees,
    "data/annotated": _annotated,
    "data/shelf": _shelf,
    "runs/detect-trees-1": _trees_run,
}

FEW_STEPS = "--steps 1 --batch-size 2 --workers 0"

SHORTER: dict[str, str] = {
    "vil train quickstart --output runs/mine --resume auto": (
        "vil train quickstart --output runs/mine --resume auto --steps 2"
    ),
    "vil train --data my_photos": "vil train --data my_photos --epochs 2 --workers 0",
    "vil train --resume runs/own_images-1 --epochs 90": "vil train --resume runs/own_images-1 --epochs 3",
    "vil train --data my_photos --init my_classifier": (
        "vil train --data my_photos --init my_classifier --epochs 1 --workers 0"
    ),
    "vil train --data my_photos --grad-checkpointing strips": (
        f"vil train --data my_photos --grad-checkpointing strips {FEW_STEPS}"
    ),
    "vil train": "vil train --steps 20",
    "vil train cifar10 --data torch/cifar10:/data --epochs 5 --lr 1e-3": (
        f"vil train cifar10 --data cifar10.npz --lr 1e-3 {FEW_STEPS}"
    ),
    "vil train imagenet1k_384_base --init imagenet21k_base.safetensors --data /data/imagenet": (
        "vil train imagenet1k_384_base --init imagenet21k_base.safetensors --data /data/imagenet "
        f"--model vision_longformer_tiny_384 {FEW_STEPS}"
    ),
    "vil bench attention --quick --only shapes": "vil bench attention --quick --only shapes --budget 10",
    "vil bench models --models vision_longformer_tiny,vision_longformer_small --baseline vision_longformer_tiny "
    "--sizes 224x224,448x448,896x896,800x1333 --batch 1": (
        "vil bench models --models vision_longformer_micro --baseline vision_longformer_micro --sizes 32x32 --quick"
    ),
    "python examples/to_coco.py /data/annotated /data/shelf": (
        "python examples/to_coco.py /data/annotated /data/converted"
    ),
    "python scripts/spatial_memory.py": "python scripts/spatial_memory.py 64",
    "vil detect train --data /data/shelf": f"vil detect train --data /data/shelf {FEW_STEPS}",
    "vil detect train --resume runs/detect-own_objects-1 --epochs 40": (
        "vil detect train --resume runs/detect-own_objects-1 --epochs 1"
    ),
    "vil detect train": f"vil detect train --data /data/trees {FEW_STEPS}",
    "python examples/to_coco.py /data/annotated /data/trees --tile 400 --validation 4 --name tree": (
        "python examples/to_coco.py /data/annotated /data/cut --tile 400 --validation 4 --name tree"
    ),
}
"""Commands as printed, and what is run in their place."""

SHORTER_CODE: dict[str, str] = {
    'train("quickstart", epochs=5)': 'train("quickstart", steps=20)',
    "fast = torch.compile(model)": 'fast = torch.compile(model, backend="aot_eager")',
}
"""Parts of Python blocks, and what is run in their place."""

ABSOLUTE, RELATIVE = "/data/", "data/"
"""Where the pages say that data are, and where tests have them."""

NOT_RUN: dict[str, str] = {
    "pip install": "CI installs the package as the README says",
    "python examples/serve_classifier.py": "test_examples.py starts it and asks it",
    "pytest": "CI runs the tests",
    "vil detect convert": "test_detection_release.py converts made-up released detectors",
    "vil hub push": "there is no network in tests",
    "torchrun": "several processes are started by tests of training; here its command line is parsed",
    "mkdocs": "test_site_is_built",
    "npm pack": "there is no network in tests",
    "python -m vision_longformer.studies.cifar10": "test_studies_cifar10.py converts a package of its own",
    "vil study mechanisms --scale imagenet": "test_studies_runner.py runs jobs through submitit",
    "sbatch": "test_launchers.py runs the script with a Slurm that does nothing",
    "kubectl": "test_launchers.py reads the manifest",
    "python scripts/soak.py": "it takes an hour, and root to mount a small disk",
}
"""Beginnings of commands that are not run here, and why."""


ONNX = ("onnx", "onnxruntime", "onnxscript")

NEIGHBOURS = ("lightning", "segmentation_models_pytorch", "transformers")

NEEDS: dict[str, tuple[str, ...]] = {
    "coming_from.md": NEIGHBOURS,
    "export.md": (*ONNX, "openvino"),
    "own_objects.md": ONNX,
    "large_images.md": ("zarr",),
}
"""Packages beyond the core that a page's commands need; without them it is skipped."""


def command_as_run(command: str) -> str | None:
    """What a test runs for a printed command; None if nothing."""
    if command.startswith(tuple(NOT_RUN)):
        return None
    return SHORTER.get(command, command).replace(ABSOLUTE, RELATIVE)


def code_as_run(code: str) -> str:
    for printed, shorter in SHORTER_CODE.items():
        code = code.replace(printed, shorter)
    return code.replace(ABSOLUTE, RELATIVE)


def make_files(text: str, folder: Path) -> None:
    """Make what ``text`` mentions and ``folder`` does not have yet."""
    for name, make in FILES.items():
        path = folder / name
        if name in text and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            make(path)
