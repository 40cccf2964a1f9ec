"""OpenVINO's files: what is in them, and that they compute the same; int8 is in ``test_quantise.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import openvino
import pytest
import torch
from builders import small_config
from torch import Tensor, nn
from torch.export import Dim

from vision_longformer import VisionLongformer
from vision_longformer.classification.export import export_model
from vision_longformer.cli.quantise import quantise as command
from vision_longformer.errors import CheckpointError
from vision_longformer.export import export_verified, load_exported
from vision_longformer.export.quantise import quantise
from vision_longformer.export.runtime import file_bytes
from vision_longformer.models.config import Longformer

METADATA = {"format": "vision_longformer_export/1", "kind": "toy", "size": [2, 3], "about": '<"trees"> & 1e5'}


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return images * self.factor, images.sum(1)


def _export_scale(path: Path, **metadata: str) -> Path:
    shapes = ({0: Dim("batch", min=1)},)
    names = {"input_names": ["images"], "output_names": ["scaled", "sums"], "dynamic_shapes": shapes}
    export_verified(
        Scale().eval(), [(torch.ones(2, 3),)], path, format="openvino", metadata={**METADATA, **metadata}, **names
    )
    return path


@pytest.fixture(scope="module")
def scale(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _export_scale(tmp_path_factory.mktemp("openvino") / "scale.xml")


def test_what_is_in_a_file(scale: Path) -> None:
    """Names, metadata and an open batch; the weights in a file beside it, and nothing else."""
    assert sorted(file.name for file in scale.parent.iterdir()) == ["scale.bin", "scale.xml"]
    model = openvino.Core().read_model(scale)
    assert [one.any_name for one in (*model.inputs, *model.outputs)] == ["images", "scaled", "sums"]
    assert model.input().partial_shape.to_string() == "[?,3]"
    exported = load_exported(scale)
    assert exported.metadata == METADATA
    scaled, sums = exported(torch.tensor([[1.0, 1.0, 2.0]]))
    assert (scaled.tolist(), sums.tolist()) == ([[1.0, 2.0, 6.0]], [4.0])
    assert file_bytes(scale) == scale.stat().st_size + scale.with_suffix(".bin").stat().st_size


def test_files_that_are_refused(scale: Path, tmp_path: Path) -> None:
    (tmp_path / "alone.xml").write_bytes(scale.read_bytes())
    with pytest.raises(FileNotFoundError, match=r"there is no file .*alone\.bin"):
        load_exported(tmp_path / "alone.xml")
    foreign = openvino.Core().read_model(scale)
    foreign.set_rt_info("{}", ["vision_longformer", "metadata"])
    openvino.save_model(foreign, tmp_path / "foreign.xml")
    with pytest.raises(CheckpointError, match=r"foreign\.xml was not written by 'vil export'"):
        load_exported(tmp_path / "foreign.xml")
    with pytest.raises(ValueError, match=r"int8 in OpenVINO needs images .* give --data DATA"):
        quantise(scale, "int8")


def test_bf16_rounds_the_weights(tmp_path: Path) -> None:
    """bf16 has 7 bits behind the point: 1 + 1/256 and 1 + 3/256 lie in the middle between two numbers, and are rounded
    to the even one. Vectors are not rounded."""
    layer = nn.Linear(2, 1)
    layer.load_state_dict({"weight": torch.tensor([[1 + 1 / 256, 1 + 3 / 256]]), "bias": torch.tensor([1 / 1024])})
    export_verified(
        layer, [(torch.ones(2, 2),)], tmp_path / "layer.xml", format="openvino", metadata=METADATA,
        input_names=("images",), output_names=("sums",), dynamic_shapes=({0: Dim("batch", min=1)},),
    )  # fmt: skip
    small = quantise(tmp_path / "layer.xml", "bf16")
    constants = [one for one in openvino.Core().read_model(small).get_ops() if one.get_type_name() == "Constant"]
    assert [one.get_element_type().get_type_name() for one in constants if list(one.shape) == [1, 2]] == ["bf16"]
    exported = load_exported(small)
    assert exported.metadata == {**METADATA, "precision": "bf16"}
    assert exported(torch.eye(2)).flatten().tolist() == pytest.approx([1 + 1 / 1024, 1 + 1 / 64 + 1 / 1024], abs=5e-3)


@pytest.mark.parametrize("kind", ["detector", "backbone"])
def test_what_is_no_classifier_is_refused_before_images_are_read(kind: str, tmp_path: Path) -> None:
    """int8 in OpenVINO, with data or without, and a comparison on data; bf16 without data goes on."""
    path = str(_export_scale(tmp_path / "other.xml", kind=kind))
    for data in (None, "nowhere"):
        with pytest.raises(ValueError, match=rf"other\.xml is a {kind}, and int8 in OpenVINO is for classifiers only; "
                                             r"give --to bf16, or the \.onnx file"):  # fmt: skip
            command(path, to="int8", data=data)
    with pytest.raises(ValueError, match=rf"is a {kind}, and --data compares classifiers only; leave it out"):
        command(path, to="bf16", data="nowhere")
    command(path, to="bf16")
    assert (tmp_path / "other_bf16.xml").exists()


def test_neither_file_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "scale.bin").write_bytes(b"other")
    with pytest.raises(FileExistsError, match=r"scale\.bin exists"):
        _export_scale(tmp_path / "scale.xml")
    assert (tmp_path / "scale.bin").read_bytes() == b"other"


SIGNALLED = """
import gc, signal, subprocess, sys, torch
from vision_longformer.export import load_exported

first, second = load_exported(sys.argv[1]), load_exported(sys.argv[1])
del first
gc.collect()
del second
gc.collect()
received = []
signal.signal(signal.SIGCHLD, lambda *_: received.append(1))
subprocess.run([sys.executable, "-c", ""])
print(len(received))
"""


def test_a_signal_after_models_were_dropped(scale: Path) -> None:
    """As a data loader's process gives when it ends."""
    command = [sys.executable, "-c", SIGNALLED, str(scale)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stderr


@pytest.mark.slow
def test_a_classifier_for_any_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = small_config(Longformer(window=2), Longformer(window=2), position="relative", img_size=(28, 28))
    model = VisionLongformer(config).eval()
    exported = export_model(model, tmp_path / "model.xml", format="openvino", dynamic=True)
    assert [one.shape[2:] for one in exported.differences] == [(28, 28), (29, 40), (80, 60), (4, 4)]
    assert max(one.difference for one in exported.differences) < 1e-5
