"""Train a small classifier, evaluate it at another resolution, and classify single images.

    python examples/train_classifier.py [--steps 200]

The same as `vil train`, `vil evaluate` and `vil predict`, on the built-in Fashion-MNIST images.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from vision_longformer.classification import evaluate, predict, train
from vision_longformer.data.sources import open_source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="optimiser steps; the whole recipe takes minutes")
    parser.add_argument("--output", type=Path, default=None, help="run directory; runs/quickstart-1 by default")
    arguments = parser.parse_args()

    trained = train("quickstart", steps=arguments.steps, output=arguments.output)
    print(f"{trained.best['top1']:.1f}% after {arguments.steps} steps; see {trained.run}")

    larger = evaluate(trained.checkpoint, "fashion-mnist", size=36)
    print(f"{larger.top1:.1f}% on the same {larger.samples} images at 36×36, without training for it")

    garments = open_source("fashion-mnist", "test")
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"garment_{index}.png" for index in range(3)]
        for index, path in enumerate(files):
            garments.read(index)[0].save(path)
        for prediction in predict(trained.checkpoint, files, top=2):
            best = zip(prediction.labels, prediction.probabilities, strict=True)
            print(Path(prediction.file).name, ", ".join(f"{label} {chance:.0%}" for label, chance in best))


if __name__ == "__main__":
    main()
