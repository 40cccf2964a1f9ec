"""From images of unlike sizes to the maps of a pyramid."""

from __future__ import annotations

import pytest
import torch
from builders import small_detector
from torch import Tensor
from torch.nn import functional as F

from vision_longformer.detection.backbone import ImageTransform, PyramidBackbone
from vision_longformer.detection.config import DetectorConfig
from vision_longformer.detection.detectors import retinanet


def images(*sizes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.rand(3, *size, generator=generator) for size in sizes]


def test_levels_that_a_timm_backbone_lacks() -> None:
    with pytest.raises(ValueError, match=r"strides \[64\], but resnet18 has \[2, 4, 8, 16, 32\]"):
        retinanet("resnet18", 3, levels=(5,))


def test_the_backbone_sees_no_padding_in_training() -> None:
    """Before the pyramid, an image's maps in a batch are those it has alone, and zeros beyond."""
    backbone = small_detector("retinanet").backbone.train()
    seen: list[dict[str, Tensor]] = []
    backbone.fpn.register_forward_pre_hook(lambda module, inputs: seen.append(dict(inputs[0])))
    transform = ImageTransform((64,), 128, [0.5] * 3, [0.25] * 3)  # type: ignore[arg-type]
    small_one, large_one = images((64, 64), (64, 120))
    for batch in ([small_one, large_one], [small_one], [large_one]):
        backbone(transform(batch)[0].tensors)
    for name, maps in seen[0].items():
        inside = maps[0, :, :, : seen[1][name].shape[-1]]
        torch.testing.assert_close(inside, seen[1][name][0])
        assert not maps[0, :, :, seen[1][name].shape[-1] :].any()
        torch.testing.assert_close(maps[1], seen[2][name][0])


def test_batch_normalisation_trains_on_the_whole_batch() -> None:
    backbone = PyramidBackbone(DetectorConfig("retinanet", "resnet10t", 3, channels=8)).train()
    sizes: list[tuple[int, ...]] = []
    backbone.body.register_forward_pre_hook(lambda module, inputs: sizes.append(tuple(inputs[0].shape)))
    batch = ImageTransform((64,), 96, [0.5] * 3, [0.25] * 3)(images((64, 64), (64, 90)))[0].tensors  # type: ignore[arg-type]
    backbone(batch)
    backbone.eval()(batch)
    assert sizes == [(2, 3, 64, 96), (1, 3, 64, 64), (1, 3, 64, 96)]


def test_retinanet_levels() -> None:
    """P6 comes from the last stage's map, also where its channels are the pyramid's; P7 from P6."""
    backbone = small_detector("retinanet", channels=16).backbone.eval()
    assert backbone.strides == [8, 16, 32, 64, 128]
    maps = [torch.randn(1, dim, size, size) for dim, size in ((8, 16), (16, 8), (16, 4))]
    pyramid = backbone.fpn({str(level): one for level, one in enumerate(maps)})
    torch.testing.assert_close(pyramid["p6"], backbone.fpn.extra_blocks.p6(maps[-1]))
    torch.testing.assert_close(pyramid["p7"], backbone.fpn.extra_blocks.p7(F.relu(pyramid["p6"])))


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "pvt_v2_b0"])
def test_backbones_of_timm_run_at_any_size(name: str) -> None:
    backbone = PyramidBackbone(DetectorConfig("mask_rcnn", name, 3, channels=8)).eval()
    batch = ImageTransform((64,), 160, [0.5] * 3, [0.25] * 3)(images((64, 150)))[0].tensors  # type: ignore[arg-type]
    with torch.no_grad():
        pyramid = backbone(batch)
    assert [tuple(one.shape[1:]) for one in pyramid.values()] == [
        (8, 16, 40),
        (8, 8, 20),
        (8, 4, 10),
        (8, 2, 5),
        (8, 1, 3),
    ]


def test_maps_with_as_many_rows_as_channels() -> None:
    """The first map of an image 384 pixels high has 96 rows, as many as Swin-Tiny has channels there."""
    body = PyramidBackbone(DetectorConfig("mask_rcnn", "swin_tiny_patch4_window7_224", 3, channels=8)).body.eval()
    with torch.no_grad():
        maps = body(torch.zeros(1, 3, 384, 64))
    assert [tuple(one.shape) for one in maps] == [(1, 96, 96, 16), (1, 192, 48, 8), (1, 384, 24, 4), (1, 768, 12, 2)]
