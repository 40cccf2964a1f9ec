"""Explanations: weights against what layers compute, rollout, pictures, and the page in a browser."""

from __future__ import annotations

import json
import shutil
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import SMALL_MODELS, assert_close, build, image, small_config
from PIL import Image, ImageColor
from torch import Tensor
from torch.nn import functional as F

import vision_longformer
from vision_longformer import VisionLongformer
from vision_longformer.checkpoint.native import DETECTOR, write
from vision_longformer.cli.explain import explain as explain_command
from vision_longformer.cli.parser import Group, run_command
from vision_longformer.explain import (
    Explanation,
    Layer,
    all_local_rows,
    capture,
    draw,
    explain,
    global_maps,
    global_rows,
    rollout,
    token_maps,
    write_page,
)
from vision_longformer.explain.explanation import View, _drawn_size, centre_view, input_point
from vision_longformer.explain.page import affordable
from vision_longformer.explain.pictures import LINE
from vision_longformer.explain.weights import under_patches
from vision_longformer.geometry import Grid
from vision_longformer.models import config as cfg

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

MODELS = [
    name
    for name, config in SMALL_MODELS.items()
    if all(isinstance(stage.attention, cfg.Longformer | cfg.Full) for stage in config.stages)
]
RELEASE = cfg.Longformer(window=3, rule="cyclic_release")


def _layers(model: VisionLongformer, height: int = 61, width: int = 45) -> list[Layer]:
    return capture(model.double().eval(), image(height, width, 1, torch.float64))


def _matrix(layer: Layer) -> Tensor:
    """All weights of a layer, (heads, G + N, G + N)."""
    count = len(layer.tokens)
    matrix = torch.zeros(layer.heads, count, count, dtype=torch.float64)
    for rows in (global_rows(layer), *all_local_rows(layer)):
        matrix[:, rows.queries[:, None], rows.keys] = rows.weights
    return matrix


def _attended(layer: Layer, matrix: Tensor) -> Tensor:
    """Weights × values through the output projection, (G + N, dim)."""
    attention, count = layer.attention, layer.global_tokens
    values = attention.project(layer.tokens[None])[2][0]
    output = attention.proj(torch.einsum("hqk,khd->qhd", matrix, values).flatten(1))
    separate = getattr(attention, "qkv_global", None)
    if separate is not None:
        values = separate(layer.tokens).unflatten(1, (3, layer.heads, -1))[:, 2]
        rows = torch.einsum("hqk,khd->qhd", matrix[:, :count], values).flatten(1)
        output = torch.cat([attention.proj_global(rows), output[count:]])  # type: ignore[union-attr, operator]
    return output


def _output(layer: Layer) -> Tensor:
    """What the layer itself computes, (G + N, dim)."""
    return layer.attention(layer.tokens[None], layer.grid, layer.neighbours)[0]


# Weights


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_layer(name: str) -> None:
    """Of the ordinary path: weights × values are its output, and every row is a distribution."""
    for layer in _layers(build(name)):
        matrix = _matrix(layer)
        assert_close(matrix.sum(-1), torch.ones_like(matrix[..., 0]), 1e-12, "sum of a row")
        assert matrix.min() >= 0
        assert_close(_attended(layer, matrix), _output(layer), 1e-10)


@pytest.mark.parametrize("options", [{}, {"eval_neighbours": "self"}])
@pytest.mark.parametrize("mechanism", [RELEASE, cfg.Longformer(window=3, rule="cyclic")])
@pytest.mark.parametrize("size", [(64, 64), (44, 116), (12, 20)])
def test_wrapped_windows(mechanism: cfg.Longformer, size: tuple[int, int], options: dict[str, Any]) -> None:
    """With few chunks or many, whole or not: with padding attended to, rows miss what it takes."""
    torch.manual_seed(3)
    model = VisionLongformer(small_config(mechanism, mechanism, position="relative"), **options)
    for layer in _layers(model, *size):
        matrix = _matrix(layer)
        assert matrix.sum(-1).max() <= 1 + 1e-12
        assert_close(_attended(layer, matrix), _output(layer), 1e-10)


@pytest.mark.parametrize("rule", ["chunk", "exact"])
def test_equal_scores_spread_over_the_visible_keys(rule: str) -> None:
    model = VisionLongformer(small_config(cfg.Longformer(window=3, rule=rule)))
    for parameter in model.stages[0].blocks[0].attn.qkv.parameters():  # type: ignore[union-attr, index]
        torch.nn.init.zeros_(parameter)
    (layer,) = _layers(model)
    height, width = layer.grid
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    for row, column in ((0, 0), (7, 5), (height - 1, 4)):
        seen = ((rows // 3 - row // 3).abs() <= 1) & ((columns // 3 - column // 3).abs() <= 1)
        if rule == "exact":
            seen = seen & ((rows - row).abs() <= 3) & ((columns - column).abs() <= 3)
        maps, to_global = token_maps(layer, (row, column))
        expected = seen.double() / (seen.sum() + 1)
        assert_close(maps, expected.expand(2, -1, -1), 1e-12)
        assert_close(to_global, torch.full_like(to_global, 1 / (int(seen.sum()) + 1)), 1e-12)
    maps, to_global = global_maps(layer)
    assert_close(maps, torch.full_like(maps, 1 / (height * width + 1)), 1e-12)
    assert_close(to_global, torch.full_like(to_global, 1 / (height * width + 1)), 1e-12)


def test_attention_that_is_known() -> None:
    """A bias that only favours the key two rows above and one column to the right, in the second head."""
    model = VisionLongformer(small_config(cfg.Longformer(window=3), position="relative"))
    with torch.no_grad():
        model.stages[0].blocks[0].attn.bias.table[1, 5 + 2, 5 - 1] = 100  # type: ignore[union-attr, index]
    (layer,) = _layers(model)
    maps, _ = token_maps(layer, (7, 5))
    assert maps[1, 5, 6] > 1 - 1e-12
    assert maps[0, 5, 6] < 0.1


def test_the_model_is_left_as_it_was() -> None:
    model = build("vil").eval()
    pixels = image(batch=1)
    before = model(pixels)
    layers = capture(model, pixels)
    assert [(layer.stage, layer.block, layer.stride) for layer in layers] == [
        (1, 1, 4), (2, 1, 8), (3, 1, 16), (3, 2, 16), (4, 1, 32)
    ]  # fmt: skip
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model(pixels), before)


def test_stages_of_a_pruned_backbone() -> None:
    """Backbones of detectors may lack their last stages."""
    model = build("vil").eval()
    model.prune_intermediate_layers([0, 1])
    layers = capture(model, image(batch=1))
    assert [(layer.stage, layer.block, layer.stride, tuple(layer.grid)) for layer in layers] == [
        (1, 1, 4, (16, 16)), (2, 1, 8, (8, 8))
    ]  # fmt: skip


# Rollout


def _patch_matrix(coarse: Grid, patch: int, fine: Grid) -> Tensor:
    """Which cells of the finer map each patch averages, (coarse, fine) with rows that sum to one."""
    cells = torch.arange(fine.tokens)
    owner = cells // fine.width // patch * coarse.width + cells % fine.width // patch
    member = F.one_hot(owner, coarse.tokens).t().double()
    return member / member.sum(1, keepdim=True)


@pytest.mark.parametrize("name", ["vil", "full_relative", "carried", "vil_no_tokens"])
def test_rollout_is_a_product_of_matrices(name: str) -> None:
    model = build(name)
    layers = _layers(model)
    result = rollout(layers, model.config)
    tokens = layers[-1].tokens.shape[0]
    shares = torch.full((tokens,), 1 / tokens, dtype=torch.float64)
    if model.config.global_pool == "token":
        shares = torch.eye(tokens).double()[0]
    for layer, before in zip(reversed(layers), [*reversed(layers[:-1]), None], strict=True):
        identity = torch.eye(len(layer.tokens)).double()
        shares = shares @ (0.5 * _matrix(layer).mean(0) + 0.5 * identity)
        if layer.block == 1:
            learned, local = shares.split([layer.global_tokens, layer.grid.tokens])
            assert_close(result.maps[layer.stage - 1].flatten(), local, 1e-12, f"stage {layer.stage}")
        if before is not None and before.stage < layer.stage:
            patch = model.config.stages[before.stage].patch
            carried = learned if name == "carried" else torch.zeros(before.global_tokens).double()
            shares = torch.cat([carried, local @ _patch_matrix(layer.grid, patch, before.grid)])
    assert result.learned == pytest.approx(1 - float(result.maps[0].sum()), abs=1e-15)
    if name == "vil_no_tokens":
        assert result.learned == pytest.approx(0, abs=1e-12)


def test_shares_under_patches() -> None:
    """Border patches have fewer cells; cells that were dropped get nothing."""
    shares = torch.tensor([[0.4, 0.2], [0.3, 0.1]])
    padded = under_patches(shares, 2, Grid(3, 4))
    assert_close(padded, torch.tensor([[0.1, 0.1, 0.05, 0.05]] * 2 + [[0.15, 0.15, 0.05, 0.05]]), 1e-7)
    dropped = under_patches(shares, 2, Grid(5, 4))
    assert dropped[4].abs().max() == 0
    assert dropped.sum() == pytest.approx(1)


# From an image file


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build("partial_vil", img_size=(48, 48))
    return vision_longformer.save(model, tmp_path_factory.mktemp("model") / "model.safetensors")


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("photo") / "a <b> & c.png"
    pixels = np.random.default_rng(0).integers(0, 256, (80, 120, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture(scope="module")
def explanation(checkpoint: Path, photo: Path) -> Explanation:
    return explain(checkpoint, photo)


@pytest.mark.parametrize("size", [(80, 120), (300, 90), (50, 50)])
@pytest.mark.parametrize("point", [(0.5, 0.5), (0.6, 0.42)])
def test_points_are_where_the_model_sees_them(
    checkpoint: Path, size: tuple[int, int], point: tuple[float, float]
) -> None:
    """A white spot in a black image is found in the model's input where the point is said to be."""
    from vision_longformer.classification.model import load_classifier

    preprocessing = load_classifier(checkpoint).preprocessing
    x, y = int(point[0] * size[1]), int(point[1] * size[0])
    pixels = np.zeros((*size, 3), np.uint8)
    pixels[y - 2 : y + 3, x - 2 : x + 3] = 255
    seen = preprocessing.denormalise(preprocessing.transform()(Image.fromarray(pixels))[None])[0, 0].double()
    middles = torch.arange(48) + 0.5
    centre = float((seen.sum(0) * middles).sum() / seen.sum()), float((seen.sum(1) * middles).sum() / seen.sum())
    view = centre_view((size[1], size[0]), preprocessing.size, preprocessing.crop_pct)
    assert input_point((x, y), (size[1], size[0]), view) == pytest.approx(centre, abs=0.6)


def test_what_is_explained(explanation: Explanation, photo: Path) -> None:
    assert explanation.prediction.file == str(photo)
    assert explanation.point == pytest.approx((24, 24), abs=0.5)
    assert [len(layers) for layers in explanation.stages] == [1, 1, 1, 1]
    assert [layer.window for layer in explanation.layers] == [2, 2, None, None]
    assert [layer.cell((47.9, 9)) for layer in explanation.layers] == [(2, 11), (1, 5), (0, 2), (0, 1)]
    shares = float(explanation.rollout.maps[0].sum())
    assert 0.3 < shares < 1
    assert explanation.rollout.learned == pytest.approx(1 - shares)


@pytest.mark.parametrize(
    ("pixels", "side", "scale"), [((80, 120), 48, 54 / 80), ((162, 300), 144, 54 / 162), ((540, 540), 192, 0.1)]
)
def test_images_are_as_fine_as_their_files(
    checkpoint: Path, pixels: tuple[int, int], side: int, scale: float, tmp_path: Path
) -> None:
    """The input is 48×48 of 54×54 (crop 0.875); a file three times as fine is drawn so, up to four times."""
    Image.new("RGB", pixels[::-1], "red").save(tmp_path / "red.png")
    result = explain(checkpoint, tmp_path / "red.png")
    assert result.size == (48, 48)
    assert result.image.size == (side, side)
    assert centre_view(pixels[::-1], (48, 48), 0.875).scale == pytest.approx(scale)
    assert _drawn_size((400, 400), View(0.1, 0, 0, (400, 400))) == (800, 800)  # not beyond 900 pixels


def test_picture(explanation: Explanation, tmp_path: Path) -> None:
    """Rows of a stage's layers or of every stage, one panel for one head; only chunks are outlined in colour."""
    sizes, outlined = [], []
    for number, options in enumerate(({}, {"stage": 3}, {"head": 2})):
        with Image.open(draw(explanation, tmp_path / f"{number}.png", **options)) as picture:
            sizes.append(picture.size)
            coloured = np.asarray(picture.convert("RGB")) == ImageColor.getrgb(LINE)
            outlined.append(bool(coloured.all(-1).any()))
    assert outlined == [True, False, True]
    assert sizes[1][1] < sizes[0][1] == sizes[2][1]
    assert sizes[2][0] < sizes[0][0] == sizes[1][0]


def _data(page: Path) -> dict[str, Any]:
    text = page.read_text("utf-8").partition('id="data">')[2].partition("</script>")[0]
    return json.loads(text)


def _row(stage: dict[str, Any], head: dict[str, str], cell: tuple[int, int]) -> Tensor:
    """The weights of a query as the page reads them, spread over the map."""
    lines = [
        [(position, strip) for strip in stage[axis] for position in strip["stored"]] for axis in ("rows", "columns")
    ]
    weights, start, spread = b64decode(head["weights"]), 0, torch.zeros(*stage["grid"])
    largest = np.frombuffer(b64decode(head["largest"]), "<f4")
    for index, (row, column) in enumerate((row, column) for row in lines[0] for column in lines[1]):
        shape = len(row[1]["seen"]), len(column[1]["seen"])
        if (row[0], column[0]) == cell:
            steps = torch.frombuffer(bytearray(weights[start : start + shape[0] * shape[1]]), dtype=torch.uint8)
            cells = torch.tensor(row[1]["seen"])[:, None], torch.tensor(column[1]["seen"])
            spread[cells] = steps.view(shape) * float(largest[index]) / 255
            return spread
        start += shape[0] * shape[1]
    raise KeyError(cell)


def test_the_page_holds_the_weights(explanation: Explanation, tmp_path: Path) -> None:
    data = _data(write_page(explanation, tmp_path / "page.html"))
    for stage, layer in zip(data["stages"], explanation.layers, strict=True):
        cell = layer.cell((40, 21))
        for head, expected in enumerate(token_maps(layer, cell)[0]):
            got = _row(stage, stage["blocks"][0]["heads"][head], cell)
            assert_close(got, expected, float(expected.max()) / 500, f"stage {layer.stage}, head {head + 1}")
        assert ("globals" in stage["blocks"][0]) == (layer.stage < 4)


def test_pages_that_would_be_too_large_are_coarser(explanation: Explanation, tmp_path: Path) -> None:
    full = affordable(explanation.stages, 10**9)
    assert all(detail.each_head and detail.step == 1 for detail in full)
    sizes = [detail.size for detail in full]
    assert sizes[3] == 2 * 4 * 4  # two heads, 2×2 queries and keys
    budget = sum(sizes) - sizes[0] // 2 - 1
    first, *others = affordable(explanation.stages, budget)
    assert (first.each_head, first.step, first.size) == (False, 2, pytest.approx(sizes[0] / 8, rel=0.1))
    assert others == full[1:]
    stage = _data(write_page(explanation, tmp_path / "page.html", budget=budget))["stages"][0]
    layer = explanation.layers[0]
    assert (stage["step"], stage["eachHead"], len(stage["blocks"][0]["heads"])) == (2, False, 1)
    expected = token_maps(layer, (5, 3))[0].mean(0)
    assert_close(_row(stage, stage["blocks"][0]["heads"][0], (5, 3)), expected, float(expected.max()) / 500)
    with pytest.raises(ValueError, match="give a larger budget"):
        affordable(explanation.stages, 3)


# The command and its mistakes


def _vil(*argv: object) -> None:
    run_command("vil", Group("", {"explain": explain_command}), ["explain", *map(str, argv)], "0")


def test_command(checkpoint: Path, photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = checkpoint, photo, "--point", "70,40", "--stage", 2, "--head", 1, "--output", tmp_path / "seen"
    _vil(*argv)
    assert [path.name for path in sorted(tmp_path.glob("seen/*"))] == [f"{photo.stem}.html", f"{photo.stem}.png"]
    data = _data(tmp_path / "seen" / f"{photo.stem}.html")
    assert (data["stage"], data["head"]) == (2, 1)
    assert data["point"] == pytest.approx([(70.5 - 60) * 54 / 80 + 24, (40.5 - 40) * 54 / 80 + 24], abs=0.01)
    assert "wrote" in capsys.readouterr().out
    with pytest.raises(FileExistsError, match=r"\.png exists; .* replace pictures with --overwrite"):
        _vil(*argv)
    (tmp_path / "seen" / f"{photo.stem}.png").unlink()
    with pytest.raises(FileExistsError, match=r"\.html exists; .* replace it with --overwrite"):
        _vil(*argv)
    _vil(checkpoint, photo, "--stage", 1, "--output", tmp_path / "seen", "--overwrite")
    assert _data(tmp_path / "seen" / f"{photo.stem}.html")["stage"] == 1
    _vil(*argv, "--overwrite")
    assert _data(tmp_path / "seen" / f"{photo.stem}.html")["stage"] == 2


def test_command_at_another_size(checkpoint: Path, photo: Path, tmp_path: Path) -> None:
    """Maps of 8 by 16 tokens of 4 pixels; the middle of the photo is the middle of the input."""
    seen = explain(checkpoint, photo, size=(32, 64))
    assert (seen.size, seen.layers[0].grid) == ((32, 64), (8, 16))
    assert seen.point == pytest.approx((32, 16), abs=0.5)
    _vil(checkpoint, photo, "--size", "32x64", "--output", tmp_path / "seen")
    assert _data(tmp_path / "seen" / f"{photo.stem}.html")["stages"][0]["grid"] == [8, 16]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--point", "200,10"], "point is 200,10; .* 120×80 pixels the model sees x from 24 to 95 and y from 4 to 75"),
        (["--point=-1,40"], "point is -1,40; "),
        (["--point", "12"], "write X,Y in pixels"),
        (["--stage", "5"], "stage is 5; this model has stages 1 to 4"),
        (["--stage", "0"], "stage is 0; this model has stages 1 to 4"),
        (["--stage", "2", "--head", "3"], "head is 3; stage 2 has heads 1 to 2"),
        (["--size", "0"], "argument --size: '0' is not a size; write 224 or 480x640"),
    ],
)
def test_mistakes(checkpoint: Path, photo: Path, options: list[str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        _vil(checkpoint, photo, "--output", tmp_path / "seen", *options)
    assert not (tmp_path / "seen").exists()


def test_points_at_the_border_are_seen(checkpoint: Path, photo: Path) -> None:
    """The range that the sentence above names is right at both ends."""
    last = explain(checkpoint, photo, point=(95, 75))
    assert last.layers[0].cell(last.point) == (11, 11)
    first = explain(checkpoint, photo, point=(24, 4))
    assert first.layers[0].cell(first.point) == (0, 0)


def test_files_that_cannot_be_explained(checkpoint: Path, photo: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no image file"):
        _vil(checkpoint, tmp_path / "none.png")
    broken = tmp_path / "broken.png"
    broken.write_bytes(photo.read_bytes()[:200])
    with pytest.raises(ValueError, match="cannot be read as an image"):
        _vil(checkpoint, broken)
    linear = vision_longformer.save(build("partial_linformer"), tmp_path / "linear.safetensors")
    with pytest.raises(ValueError, match=r"stage 1 has linformer attention; only .* longformer or full"):
        _vil(linear, photo)
    detector = write(tmp_path / "detector.safetensors", {"x": torch.ones(1)}, format=DETECTOR, config={})
    with pytest.raises(ValueError, match=r"is a detector, .* capture\(detector_backbone"):
        _vil(detector, photo)
    (tmp_path / "best.onnx").write_bytes(b"any")
    with pytest.raises(
        ValueError, match=r"best\.onnx is an exported file, .* give the run directory or the \.safetensors"
    ):
        _vil(tmp_path / "best.onnx", photo)


def test_capture_of_something_else() -> None:
    model = build("vil")
    with pytest.raises(ValueError, match="evaluation mode"):
        capture(model, image(batch=1))
    with pytest.raises(ValueError, match="one image"):
        capture(model.eval(), image(batch=2))


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


def _hover(page: Any, x: float, y: float) -> tuple[dict[str, str], str]:
    """What the page then says of the map, and its pixels."""
    area = page.locator("#map").bounding_box()
    page.mouse.move(area["x"] + x * area["width"], area["y"] + y * area["height"])
    return page.evaluate("[{...canvas.dataset}, canvas.toDataURL()]")


def test_hovering_shows_the_map_of_the_token_under_the_mouse(
    browser: Any, explanation: Explanation, tmp_path: Path
) -> None:
    path = write_page(explanation, tmp_path / "page.html")
    page = browser.new_page()
    problems: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    assert page.locator("h1").inner_text().endswith("a <b> & c.png")
    pictures = set()
    for stage, x, y in ((1, 0.1, 0.1), (1, 0.8, 0.6), (3, 0.1, 0.1), (3, 0.9, 0.9)):
        page.check(f"input[name=stage][value='{stage - 1}']", force=True)
        layer = explanation.layers[stage - 1]
        cell = layer.cell((48 * x, 48 * y))
        said, picture = _hover(page, x, y)
        weights = token_maps(layer, cell)[0].mean(0)
        best = tuple(map(int, said["strongest"].split(",")))
        assert said["query"] == f"{cell[0]},{cell[1]}"
        assert float(said["largest"]) == pytest.approx(float(weights.max()), rel=0.01)
        assert weights[best] >= 0.99 * weights.max()
        pictures.add(picture)
    assert len(pictures) == 4
    assert problems == []
    assert requests == [path.as_uri()]


def test_the_page_by_keyboard(browser: Any, explanation: Explanation, tmp_path: Path) -> None:
    """The token moves by arrow keys and stays where it is held; radio buttons choose what is shown."""
    page = browser.new_page()
    page.goto(write_page(explanation, tmp_path / "page.html", stage=1, head=2).as_uri())
    layer = explanation.layers[0]
    row, column = layer.cell(explanation.point)
    page.focus("#map")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    assert page.locator("#map").get_attribute("data-query") == f"{row - 1},{column + 1}"
    page.keyboard.press("Enter")
    held, _ = _hover(page, 0.1, 0.1)
    assert held["query"] == f"{row - 1},{column + 1}"
    expected = token_maps(layer, (row - 1, column + 1))[0][1].max()
    assert float(held["largest"]) == pytest.approx(float(expected), rel=1e-4)
    page.focus("input[name=view]")
    page.keyboard.press("ArrowRight")
    shares = global_maps(layer)[0][1]
    assert float(page.locator("#map").get_attribute("data-largest")) == pytest.approx(float(shares.max()), rel=1e-4)
    page.keyboard.press("ArrowRight")
    shares = explanation.rollout.maps[0]
    assert float(page.locator("#map").get_attribute("data-largest")) == pytest.approx(float(shares.max()), rel=1e-4)
    assert "learned tokens" in page.locator("#readout").inner_text()
