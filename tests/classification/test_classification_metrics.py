"""Accuracy, loss and confusions against plain computation, and models evaluated with them."""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, isnan, log
from typing import Any

import pytest
import torch
from builders import SMALL_MODELS
from torch import Tensor, distributed, nn

from vision_longformer.classification import evaluate as metrics
from vision_longformer.classification.evaluate import Result, Score, evaluate_model, in_step


def _score(logits: Tensor, labels: Tensor, *, batch: int = 100) -> Result:
    score = Score(logits.shape[1], "cpu")
    for part, its_labels in zip(logits.split(batch), labels.split(batch), strict=True):
        score.add(part, its_labels)
    return score.result()


def _plainly(logits: Tensor, labels: Tensor) -> dict[str, Any]:
    """The same by loops over samples and classes, in Python's floats."""
    classes = logits.shape[1]
    confusion = [[0] * classes for _ in range(classes)]
    loss, top5 = 0.0, 0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        order = sorted(range(classes), key=lambda index: (-row[index], index))
        confusion[label][order[0]] += 1
        top5 += label in order[:5]
        loss += log(sum(exp(value) for value in row)) - row[label]
    count, right = len(labels), sum(confusion[index][index] for index in range(classes))
    return {"top1": 100 * right / count, "top5": 100 * top5 / count, "loss": loss / count, "confusion": confusion}


@pytest.mark.parametrize("classes", [2, 5, 13])
@pytest.mark.parametrize("batch", [1, 7, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_score_is_what_loops_count(classes: int, batch: int, dtype: torch.dtype) -> None:
    """In bfloat16, where many logits are equal, too; the loss does not lose digits over many batches."""
    logits = (2 * torch.randn(40, classes)).to(dtype)
    labels = torch.randperm(40) % classes
    result, expected = _score(logits, labels, batch=batch), _plainly(logits, labels)
    assert (result.samples, result.top1, result.top5) == (40, expected["top1"], expected["top5"])
    assert result.loss == pytest.approx(expected["loss"], rel=1e-12)
    assert result.confusion is not None
    assert result.confusion.tolist() == expected["confusion"]
    counts = labels.bincount(minlength=classes).tolist()
    hits = result.confusion.diagonal().tolist()
    assert result.per_class() == [(pytest.approx(100 * hit / n), n) for hit, n in zip(hits, counts, strict=True)]


def test_of_equal_logits_the_first_class_wins() -> None:
    result = _score(torch.zeros(3, 7), torch.tensor([0, 4, 5]))
    assert (result.top1, result.top5) == (pytest.approx(100 / 3), pytest.approx(200 / 3))
    assert result.confusion is not None
    assert result.confusion.nonzero().tolist() == [[0, 0], [4, 0], [5, 0]]


def test_up_to_five_classes_are_all_among_the_top_five() -> None:
    assert _score(torch.randn(9, 3), torch.arange(9) % 3).top5 == 100


def test_a_class_without_images_has_no_accuracy() -> None:
    result = _score(torch.eye(3), torch.tensor([0, 1, 1]))
    assert result.per_class()[:2] == [(100, 1), (50, 2)]
    accuracy, samples = result.per_class()[2]
    assert isnan(accuracy)
    assert samples == 0


def test_nothing_seen_is_not_zero_percent() -> None:
    result = Score(3, "cpu").result()
    assert result.samples == 0
    assert all(isnan(value) for value in (result.top1, result.top5, result.loss))


def test_many_classes_have_no_confusion_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_CONFUSABLE", 2)
    result = _score(torch.eye(3), torch.tensor([0, 1, 1]))
    assert result.confusion is None
    assert (result.top1, result.per_class()[1]) == (pytest.approx(200 / 3), (50, 2))


def test_processes_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process's sums arrive in the order in which ours are sent."""
    logits, labels = torch.randn(10, 6), torch.randint(6, (10,))
    ours, theirs = Score(6, "cpu"), Score(6, "cpu")
    ours.add(logits[:7], labels[:7])
    theirs.add(logits[7:], labels[7:])
    sent: list[Tensor] = []
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "all_reduce", sent.append)
    theirs.reduce()
    arriving = iter(sent)
    monkeypatch.setattr(distributed, "all_reduce", lambda part: part.add_(next(arriving)))
    ours.reduce()
    got, expected = ours.result(), _score(logits, labels)
    assert got[:3] == expected[:3]
    assert got.loss == pytest.approx(expected.loss, rel=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(got[4:7], expected[4:7], strict=True))


def test_processes_run_as_many_batches_as_the_one_with_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """This one has a batch, the other three; those to spare are run and not counted."""
    others = iter([1, 1, 1, 0])
    monkeypatch.setattr(distributed, "all_reduce", lambda flag: flag.add_(next(others)))
    own = torch.ones(2, 3, 64, 64), torch.tensor([1, 4])
    first, *spare = in_step([own], SMALL_MODELS["two_stages"], torch.device("cpu"))
    assert first is own
    assert [(images.shape, len(labels)) for images, labels in spare] == [((1, 3, 64, 64), 0)] * 2
    score = Score(5, "cpu")
    score.add(torch.randn(1, 5)[:0], spare[0][1])
    assert score.result().samples == 0


class _Data:
    """Ten images of two pixels in batches of four, as evaluation data."""

    classes = ("low", "mid", "high")
    size = 10
    skipped = 3

    def __init__(self) -> None:
        self.images, self.labels = torch.randn(10, 1, 1, 2), torch.arange(10) % 3

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.images.split(4), self.labels.split(4), strict=True)


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
    model, data, told = _Model().train(), _Data(), []
    result = evaluate_model(model, data, torch.device("cpu"), progress=lambda *done: told.append(done))  # type: ignore[arg-type]
    expected = _score(model.linear(data.images.flatten(1)), data.labels)
    assert result[:3] == expected[:3]
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    assert (result.skipped, result.classes) == (3, data.classes)
    assert told == [(4, 10), (8, 10), (10, 10)]
    assert model.training
    assert model.dtypes == {torch.float32}


def test_evaluate_model_in_another_precision() -> None:
    model = _Model().eval()
    evaluate_model(model, _Data(), torch.device("cpu"), torch.bfloat16)  # type: ignore[arg-type]
    assert model.dtypes == {torch.bfloat16}
    assert not model.training


def test_a_failing_evaluation_leaves_the_mode_as_it_was() -> None:
    model = _Model().train()
    model.linear = nn.Linear(5, 3)
    with pytest.raises(RuntimeError):
        evaluate_model(model, _Data(), torch.device("cpu"))  # type: ignore[arg-type]
    assert model.training
