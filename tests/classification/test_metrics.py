"""Accuracy, loss and confusions against plain computation."""

from __future__ import annotations

from math import exp, isnan, log
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from vision_longformer.classification import metrics
from vision_longformer.classification.metrics import Meter, Result


def _meter(logits: Tensor, labels: Tensor, *, batch: int = 100) -> Result:
    meter = Meter(logits.shape[1], "cpu")
    for part, its_labels in zip(logits.split(batch), labels.split(batch), strict=True):
        meter.add(part, its_labels)
    return meter.result()


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
    result, expected = _meter(logits, labels, batch=batch), _plainly(logits, labels)
    assert (result.samples, result.top1, result.top5) == (40, expected["top1"], expected["top5"])
    assert result.loss == pytest.approx(expected["loss"], rel=1e-12)
    assert result.confusion is not None
    assert result.confusion.tolist() == expected["confusion"]
    counts = labels.bincount(minlength=classes).tolist()
    hits = result.confusion.diagonal().tolist()
    assert result.per_class() == [(pytest.approx(100 * hit / n), n) for hit, n in zip(hits, counts, strict=True)]


def test_of_equal_logits_the_first_class_wins() -> None:
    result = _meter(torch.zeros(3, 7), torch.tensor([0, 4, 5]))
    assert (result.top1, result.top5) == (pytest.approx(100 / 3), pytest.approx(200 / 3))
    assert result.confusion is not None
    assert result.confusion.nonzero().tolist() == [[0, 0], [4, 0], [5, 0]]


def test_up_to_five_classes_are_all_among_the_top_five() -> None:
    assert _meter(torch.randn(9, 3), torch.arange(9) % 3).top5 == 100


def test_a_class_without_images_has_no_accuracy() -> None:
    result = _meter(torch.eye(3), torch.tensor([0, 1, 1]))
    assert result.per_class()[:2] == [(100, 1), (50, 2)]
    accuracy, samples = result.per_class()[2]
    assert isnan(accuracy)
    assert samples == 0


def test_nothing_seen_is_not_zero_percent() -> None:
    result = Meter(3, "cpu").result()
    assert result.samples == 0
    assert all(isnan(value) for value in (result.top1, result.top5, result.loss))


def test_many_classes_have_no_confusion_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_CONFUSION_CLASSES", 2)
    result = _meter(torch.eye(3), torch.tensor([0, 1, 1]))
    assert result.confusion is None
    assert (result.top1, result.per_class()[1]) == (pytest.approx(200 / 3), (50, 2))


def test_processes_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process's sums arrive in the order in which ours are sent."""
    logits, labels = torch.randn(10, 6), torch.randint(6, (10,))
    ours, theirs = Meter(6, "cpu"), Meter(6, "cpu")
    ours.add(logits[:7], labels[:7])
    theirs.add(logits[7:], labels[7:])
    sent: list[Tensor] = []
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "all_reduce", lambda part, group: sent.append(part))
    theirs.reduce()
    arriving = iter(sent)
    monkeypatch.setattr(distributed, "all_reduce", lambda part, group: part.add_(next(arriving)))
    ours.reduce()
    got, expected = ours.result(), _meter(logits, labels)
    assert got[:3] == expected[:3]
    assert got.loss == pytest.approx(expected.loss, rel=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(got[4:7], expected[4:7], strict=True))
