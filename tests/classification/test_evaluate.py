"""Evaluation: of models on batches, of checkpoints on data sets, over processes, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import build
from PIL import Image
from torch import Tensor, distributed, nn

from vision_longformer import save
from vision_longformer.classification.evaluate import evaluate, evaluate_model, pad_to_longest
from vision_longformer.classification.metrics import Meter
from vision_longformer.classification.preprocessing import Preprocessing
from vision_longformer.cli.evaluate import _mistaken
from vision_longformer.cli.evaluate import evaluate as evaluate_command
from vision_longformer.cli.parser import Group, run_command
from vision_longformer.data.images import ImageError

CLASSES = ("ant", "bee", "cat", "dog", "eel")
PREPARE = Preprocessing((64, 64), (0.4, 0.5, 0.6), (0.2, 0.25, 0.3), 0.9, "bicubic", CLASSES)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(build("two_stages"), tmp_path / "model.safetensors", info={"preprocessing": PREPARE.to_dict()})


@pytest.fixture
def arrays(tmp_path: Path) -> tuple[Path, Tensor, Tensor]:
    """Ten images of the model's own size as a data set, beside its contents."""
    images = np.random.default_rng(1).integers(0, 256, (10, 64, 64, 3), dtype=np.uint8)
    labels = np.array([0, 1, 2, 3, 0, 1, 2, 3, 0, 1])
    path = tmp_path / "ten.npz"
    np.savez(path, test_x=images, test_y=labels, train_x=images, train_y=labels, classes=np.array(CLASSES))
    return path, torch.from_numpy(images), torch.from_numpy(labels)


def _logits(images: Tensor) -> Tensor:
    """What the model says about uint8 images (n, 64, 64, 3), cropped and enlarged as its preprocessing asks."""
    transform = PREPARE.transform()
    with torch.no_grad():
        return build("two_stages").eval()(torch.stack([transform(Image.fromarray(image.numpy())) for image in images]))


# Models


class _EvalSet:
    """Ten images of two pixels in batches of four."""

    classes = ("low", "mid", "high")
    shape = (1, 1, 2)
    size = 10

    def __init__(self) -> None:
        self.skipped = ["a.png", "b.png"]
        self.images, self.labels = torch.randn(10, 1, 1, 2), torch.arange(10) % 3

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.images.split(4), self.labels.split(4), strict=True)

    def examples(self, count: int) -> tuple[Tensor, Tensor]:
        return self.images[:count], self.labels[:count]


class _Model(nn.Module):
    """A linear classifier whose dropout would show in training mode; ``dtypes`` are those of its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(2, 3), nn.Dropout(0.9)
        self.dtypes: set[torch.dtype] = set()

    def forward(self, images: Tensor) -> Tensor:
        logits = self.linear(self.drop(images.flatten(1)))
        self.dtypes.add(logits.dtype)
        return logits


def test_evaluate_model() -> None:
    model, eval_set, progress = _Model().train(), _EvalSet(), []
    result = evaluate_model(model, eval_set, torch.device("cpu"), progress=lambda *done: progress.append(done))
    logits = model.linear(eval_set.images.flatten(1)).detach()
    right = (logits.argmax(1) == eval_set.labels).sum().item()
    assert result[:3] == (10, 10.0 * right, 100.0)
    assert result.loss == pytest.approx(nn.functional.cross_entropy(logits, eval_set.labels).item(), rel=1e-6)
    assert (result.skipped, result.classes) == (("a.png", "b.png"), eval_set.classes)
    assert progress == [(4, 10), (8, 10), (10, 10)]
    assert model.training
    assert model.dtypes == {torch.float32}


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_evaluate_model_in_another_precision(precision: str, dtype: torch.dtype) -> None:
    model = _Model().eval()
    evaluate_model(model, _EvalSet(), torch.device("cpu"), precision)
    assert model.dtypes == {dtype}
    assert not model.training


def test_a_failing_evaluation_leaves_the_mode_as_it_was() -> None:
    model = _Model().train()
    model.linear = nn.Linear(5, 3)
    with pytest.raises(RuntimeError):
        evaluate_model(model, _EvalSet(), torch.device("cpu"))
    assert model.training


def test_processes_run_as_many_batches_as_the_one_with_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """This one has a batch, the other three; the extra ones are run and not counted."""
    others = iter([1, 1, 1, 0])
    monkeypatch.setattr(distributed, "all_reduce", lambda flag, group: flag.add_(next(others)))
    own = torch.ones(2, 3, 64, 64), torch.tensor([1, 4])
    first, *extra = pad_to_longest([own], (3, 64, 64), torch.device("cpu"))
    assert first is own
    assert [(images.shape, len(labels)) for images, labels in extra] == [((1, 3, 64, 64), 0)] * 2
    meter = Meter(5, "cpu")
    meter.add(torch.randn(1, 5)[:0], extra[0][1])
    assert meter.result().samples == 0


# Checkpoints


def test_evaluate_is_the_model_by_hand(checkpoint: Path, arrays: tuple[Path, Tensor, Tensor]) -> None:
    path, images, labels = arrays
    result = evaluate(checkpoint, str(path), batch_size=4, workers=0)
    logits = _logits(images)
    predictions = logits.argmax(1).tolist()
    right = sum(prediction == label for prediction, label in zip(predictions, labels.tolist(), strict=True))
    assert result[:3] == (10, 10.0 * right, 100.0)
    assert result.loss == pytest.approx(nn.functional.cross_entropy(logits.double(), labels).item(), rel=1e-5)
    assert result.classes == CLASSES
    assert result.seen.tolist() == [3, 3, 2, 2, 0]
    expected = np.zeros((5, 5), int)
    np.add.at(expected, (labels.numpy(), predictions), 1)
    assert result.confusion is not None
    assert result.confusion.tolist() == expected.tolist()


def test_images_left_out_are_counted(checkpoint: Path, tmp_path: Path) -> None:
    for name in CLASSES:
        (tmp_path / "test" / name).mkdir(parents=True)
        Image.new("RGB", (100, 80), "teal").save(tmp_path / "test" / name / "good.png")
    bad = tmp_path / "test" / "bee" / "good.png"
    bad.write_bytes(b"bad")
    with pytest.raises(ImageError, match=r"bee.good\.png"):
        evaluate(checkpoint, str(tmp_path), workers=0)
    result = evaluate(checkpoint, str(tmp_path), workers=0, skip_bad_images=True)
    assert (result.samples, result.skipped, result.seen.tolist()) == (4, ("bee/good.png",), [1, 0, 1, 1, 1])
    for name in CLASSES:
        (tmp_path / "test" / name / "good.png").write_bytes(b"bad")
    with pytest.raises(ValueError, match=r"none of the 5 images of .* could be read"):
        evaluate(checkpoint, str(tmp_path), workers=0, skip_bad_images=True)


def test_evaluate_at_another_resolution(checkpoint: Path, arrays: tuple[Path, Tensor, Tensor]) -> None:
    path, *_ = arrays
    own, half = (evaluate(checkpoint, str(path), workers=0, size=size) for size in (64, 32))
    assert own.loss == evaluate(checkpoint, str(path), workers=0).loss
    assert half.samples == 10
    assert half.loss != own.loss


def test_evaluate_in_another_precision(checkpoint: Path, arrays: tuple[Path, Tensor, Tensor]) -> None:
    path, *_ = arrays
    exact, rounded = (evaluate(checkpoint, str(path), workers=0, precision=name).loss for name in ("fp32", "bf16"))
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.02)


def test_classes_must_agree(checkpoint: Path, arrays: tuple[Path, Tensor, Tensor], tmp_path: Path) -> None:
    _, images, labels = arrays
    with pytest.raises(ValueError, match="lacks class 'ant', which the model has"):
        evaluate(checkpoint, "fashion-mnist", workers=0)
    renamed = tmp_path / "renamed.npz"
    classes = np.array(["ant", "bee", "cow", "dog", "eel"])
    np.savez(renamed, test_x=images.numpy(), test_y=labels.numpy(), classes=classes)
    with pytest.raises(ValueError, match="lacks class 'cat', which the model has"):
        evaluate(checkpoint, str(renamed), workers=0)


def test_without_names_classes_must_be_as_many(arrays: tuple[Path, Tensor, Tensor], tmp_path: Path) -> None:
    path, *_ = arrays
    nameless = save(build("two_stages"), tmp_path / "nameless.safetensors")
    with pytest.raises(ValueError, match="num_classes is 5, but fashion-mnist has 10 classes"):
        evaluate(nameless, "fashion-mnist", workers=0)
    assert evaluate(nameless, str(path), workers=0).classes == CLASSES


def test_the_data_are_opened_once(
    checkpoint: Path, arrays: tuple[Path, Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the checkpoint names its classes or not."""
    path, *_ = arrays
    opened: list[str] = []
    load = np.load
    monkeypatch.setattr(np, "load", lambda file, **options: opened.append(str(file)) or load(file, **options))
    nameless = save(build("two_stages"), tmp_path / "nameless.safetensors")
    for model in (checkpoint, nameless):
        evaluate(model, str(path), workers=0)
        assert opened == [str(path)]
        opened.clear()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, "unknown precision 'fp8'; did you mean 'fp"),
        ({"size": (64, 0)}, r"image size is \(64, 0\); give one positive number or"),
        ({"size": 0}, "image size is 0; give one positive number or"),
    ],
)
def test_wrong_input_of_evaluate(checkpoint: Path, options: dict[str, int | str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(checkpoint, "fashion-mnist", **options)  # type: ignore[arg-type]


WORKER = """
import json, sys
from torch import distributed
from vision_longformer.classification.evaluate import evaluate
results = [evaluate(sys.argv[1], data, batch_size=3, workers=0) for data in sys.argv[2:]]
if distributed.get_rank() == 0:
    print(json.dumps([[*result[:4], result.confusion.tolist()] for result in results]))
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_count_every_image_once(
    checkpoint: Path, arrays: tuple[Path, Tensor, Tensor], tmp_path: Path
) -> None:
    """Ten images, and a single one, of which one process gets nothing."""
    path, images, labels = arrays
    single = tmp_path / "single.npz"
    np.savez(single, test_x=images[:1].numpy(), test_y=labels[:1].numpy(), classes=np.array(CLASSES))
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launch, str(worker), str(checkpoint), str(path), str(single)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    for data, (samples, top1, top5, loss, confusion) in zip((path, single), json.loads(output), strict=True):
        alone = evaluate(checkpoint, str(data), workers=0)
        assert (samples, top1, top5) == alone[:3]
        assert loss == pytest.approx(alone.loss, rel=1e-6)
        assert confusion == alone.confusion.tolist()  # type: ignore[union-attr]


# The command


def _vil(*argv: object) -> None:
    run_command("vil", Group("", {"evaluate": evaluate_command}), [str(word) for word in argv], "0")


def test_classes_that_are_mistaken_equally_often_are_all_named() -> None:
    """An ant was seen as a bee twice; a bee as an ant and a cat, once each; a cat as each of four others."""
    confusion = torch.tensor([[5, 2, 0, 1, 0], [1, 5, 1, 0, 0], [3, 3, 0, 3, 3], [0, 0, 0, 9, 0], [0, 0, 0, 0, 0]])
    result = Meter(5, "cpu").result()._replace(confusion=confusion, classes=CLASSES)
    mistaken = [_mistaken(result, number) for number in range(5)]
    assert mistaken == ["bee (2)", "ant, cat (1 each)", "ant, bee, dog and 1 more (3 each)", "", ""]


def test_evaluate_command(
    checkpoint: Path, arrays: tuple[Path, Tensor, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, *_ = arrays
    result = evaluate(checkpoint, str(path), workers=0)
    picture = tmp_path / "confusion.png"
    common = ("evaluate", checkpoint, "--data", path, "--workers", 0, "--per_class")
    _vil(*common, "--confusion", picture)
    output = capsys.readouterr().out
    rows = [line.split() for line in output.splitlines()]
    assert ["10", f"{result.top1:.2f}", f"{result.loss:.4f}"] in rows  # of five classes: no top-5
    assert result.confusion is not None
    assert ["ant", "3", f"{result.per_class()[0][0]:.2f}", *_mistaken(result, 0).split()] in rows
    assert ["eel", "0", "–"] in rows
    assert f"wrote {picture}" in output
    assert Image.open(picture).format == "PNG"
    with pytest.raises(FileExistsError, match=r"confusion\.png exists"):
        _vil(*common, "--confusion", picture)
    _vil(*common, "--size", "32x48", "--json")
    data = json.loads(capsys.readouterr().out)
    assert data["size"] == [32, 48]
    assert data["loss"] == evaluate(checkpoint, str(path), workers=0, size=(32, 48)).loss != result.loss
    _vil(*common, "--json")
    data = json.loads(capsys.readouterr().out)
    assert (data["samples"], data["top1"], data["loss"]) == (10, result.top1, result.loss)
    assert "top5" not in data
    assert data["classes"][4] == {"class": "eel", "samples": 0, "top1": None}
