"""One image over 2, 3 and 4 processes against the plain model in one: logits, maps, losses, all gradients, and runs.

The processes write what they computed, the tests compare. One interpreter starts them all, as torch takes long to
import.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import assert_close, fork_processes, run_program, small_config, write_garments, write_npz
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from vision_longformer import ModelConfig, VisionLongformer, classification, detection
from vision_longformer.geometry import RULES
from vision_longformer.large import spatial_parallel
from vision_longformer.large.spatial import check_divisible
from vision_longformer.models import config as cfg
from vision_longformer.models import strips as by_strips
from vision_longformer.models.vision_longformer import Block
from vision_longformer.training.distributed import make_accelerator, start_processes, together
from vision_longformer.training.recipe import TrainSettings
from vision_longformer.training.run_directory import RunDirectory

Results = dict[str, Tensor]


def longformer(
    rule: str = "chunk", windows: tuple[int, int] = (2, 3), share: bool = True, **options: Any
) -> ModelConfig:
    """Two stages of two blocks and one, with windows of different size."""
    stages = [cfg.Longformer(window, rule, share) for window in windows]
    return small_config(*stages, **{"patches": (2, 2), "depth": (2, 1), "position": "relative", **options})


@dataclass(frozen=True)
class Case:
    """A model, the size of its images, and how it is trained."""

    config: ModelConfig
    size: tuple[int, int] = (27, 11)
    checkpointing: bool | str = False
    given: int = 0
    frozen: int = 0
    dtype: torch.dtype = torch.float64

    def model(self) -> VisionLongformer:
        """In training mode, with weights so large that every token matters to those who see it."""
        model = VisionLongformer(self.config).to(self.dtype).train()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
        model.stages[: self.frozen].requires_grad_(False)
        model.set_grad_checkpointing(self.checkpointing)
        return model

    def inputs(self, number: int = 0) -> list[Tensor]:
        """Two images and, if the model takes any, given tokens."""
        generator = torch.Generator().manual_seed(1 + number)
        shapes = [(2, 3, *self.size), *([(2, self.given, 4)] if self.given else [])]
        return [torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype) for shape in shapes]


def _cases() -> dict[str, Case]:
    cases = {
        f"{rule}, {tokens} tokens": Case(
            longformer(rule, tokens=(tokens, tokens), neighbours=neighbours, drop_path_rate=0.4)
        )
        for rule in RULES
        for tokens, neighbours in ((0, "all"), (1, "random"), (3, "all"))
    }
    for height in (2, 5, 9, 34):
        cases[f"{height} rows"] = Case(longformer(tokens=(1, 0)), (height, 9))
    for height in (5, 16):
        cases[f"{height} rows, cyclic_release"] = Case(longformer("cyclic_release", (3, 2)), (height, 9))
    return cases | {
        "dropped rest": Case(longformer(patch_remainder="drop", windows=(3, 1))),
        "larger patches": Case(longformer(patches=(1, 3), windows=(4, 1)), (19, 7)),
        "absolute position": Case(longformer(position="absolute")),
        "absolute position in one table": Case(longformer(position="absolute_1d"), (5, 9)),
        "separate weights, pooled token": Case(longformer(share=False, global_pool="token")),
        "carried tokens": Case(longformer(carry_global_tokens=True, norm_embed=False)),
        "given tokens": Case(longformer(given_token_dim=4, tokens=(1, 0)), given=3),
        "frozen stage": Case(longformer(), frozen=1),
        "checkpointing": Case(longformer("cyclic", drop_path_rate=0.4, neighbours="random"), checkpointing=True),
        "checkpointing, empty bands": Case(longformer(tokens=(0, 0)), (5, 9), checkpointing=True),
        **{f"strips, {rule}": Case(longformer(rule, (2, 1), drop_path_rate=0.4), (34, 9), "strips") for rule in RULES},
        "strips, empty bands": Case(longformer(tokens=(0, 1)), (5, 9), "strips"),
        "bf16": Case(longformer(norm_embed=False), dtype=torch.float32),
        "bf16, empty bands": Case(longformer(norm_embed=False), (5, 9), "strips", dtype=torch.float32),
    }


CASES = _cases()
FEW = ("chunk, 1 tokens", "cyclic_release, 3 tokens", "5 rows", "strips, exact")
IN_PAIRS = (("cyclic, 1 tokens", "ddp"), ("chunk, 3 tokens", "fsdp"), ("5 rows", "fsdp"))


class Outputs(nn.Module):
    """Logits and the maps of all stages, with the same neighbours whenever it runs. Processes draw dropped paths apart,
    and only those of the first may count."""

    def __init__(self, model: VisionLongformer, seed: int = 0) -> None:
        super().__init__()
        self.model, self.seed = model, seed

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        self.model.random_shift.seed(5)
        torch.manual_seed(self.seed)
        logits, given = self.model(*inputs), dict(zip(("given_tokens",), inputs[1:], strict=False))
        return [logits, *self.model.forward_intermediates(inputs[0], intermediates_only=True, **given)]


def loss_of(outputs: list[Tensor]) -> Tensor:
    """One that depends on where in a map a number is."""
    return sum((out.sin() * torch.arange(out[0].numel()).view(out[0].shape).cos()).sum() for out in outputs)


def results(case: Case, network: nn.Module, model: VisionLongformer, inputs: list[Tensor]) -> Results:
    """Outputs, the loss and all gradients; models of float32 run in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16, enabled=case.dtype == torch.float32):
        outputs = network(*inputs)
    loss = loss_of(outputs)
    loss.backward()
    found = {f"output {index}": out.detach() for index, out in enumerate(outputs)} | {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            grad = parameter.grad
            found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


@lru_cache
def expected_of(case: Case, number: int = 0) -> Results:
    """Of the plain model."""
    model = replace(case, checkpointing=False).model()
    return results(case, Outputs(model), model, case.inputs(number))


# In processes of their own


def divided(case: Case, mesh: DeviceMesh, seed: int, number: int = 0, strategy: str = "ddp") -> Results:
    """A process's results for images of which it computes a band."""
    model = spatial_parallel(case.model(), mesh)
    network: nn.Module = Outputs(model, seed)
    if strategy == "fsdp":
        for block in [module for module in model.modules() if isinstance(module, Block)]:
            fully_shard(block)
        fully_shard(network)
    else:
        network = DistributedDataParallel(network)
    return results(case, network, model, case.inputs(number))


def compute_few(rank: int, count: int, folder: Path) -> None:
    _compute(rank, count, folder, FEW)
    refusal = _refusal(TrainSettings(spatial=3))
    (folder / f"{rank}.json").write_text(json.dumps({"refusal": refusal, "received": _received(count)}))


def _received(count: int) -> list[int]:
    """How many numbers a forward pass of each case receives."""
    counts = []
    send = torch.distributed.all_to_all_single

    def counting(received: Tensor, *arguments: Any, **options: Any) -> None:
        counts[-1] += received.numel()
        send(received, *arguments, **options)

    torch.distributed.all_to_all_single = counting
    for name in FEW:
        counts.append(0)
        with torch.no_grad():
            spatial_parallel(CASES[name].model(), init_device_mesh("cpu", (count,)))(*CASES[name].inputs())
    torch.distributed.all_to_all_single = send
    return counts


def _refusal(settings: TrainSettings) -> str | None:
    """What a process says to settings; only that it ends, where it says nothing."""
    start_processes()
    try:
        together(lambda: make_accelerator(settings))
    except (ValueError, SystemExit) as error:
        return repr(error)
    return None


def compute_all(rank: int, count: int, folder: Path) -> None:
    """All cases; on four processes also two pairs with different images, and runs."""
    _compute(rank, count, folder, tuple(CASES))
    if count == 2:
        train_classifier(folder / "images.npz", folder / "one_pair", spatial=2)
        train_classifier(folder / "images.npz", folder / "two_processes")
        train_detector(folder / "garments", folder / "detector", spatial=2)
    if count == 4:
        train_classifier(folder / "images.npz", folder / "two_pairs", spatial=2, strategy="fsdp")


def _compute(rank: int, count: int, folder: Path, names: Sequence[str]) -> None:
    by_strips.STRIP_NUMBERS = 1
    mesh = init_device_mesh("cpu", (count,))
    found = {name: divided(CASES[name], mesh, rank) for name in names}
    if count == 4:
        pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "spatial"))
        number = pairs.get_local_rank("data")
        for name, strategy in IN_PAIRS:
            seed = pairs.get_local_rank("spatial")
            found[f"{name}, {strategy}"] = divided(CASES[name], pairs["spatial"], seed, number, strategy)
    torch.save(found, folder / f"{count}_{rank}.pt")


def main_few(folder: Path) -> None:
    fork_processes(compute_few, 2, folder)


def main_all(folder: Path) -> None:
    for count in (2, 3, 4):
        fork_processes(compute_all, count, folder)


# Runs


def train_classifier(data: Path, output: Path, **changes: Any) -> Path:
    """20 steps that use everything random there is; with SGD, since AdamW makes a step of any rounding error."""
    settings = {"data": str(data), "image_size": [27, 20], "steps": 20, "batch_size": 4, "mixup": 0.4, "drop_path": 0.3}
    optimisation = {"optimizer": "sgd", "lr": 0.1, "warmup": 0, "neighbours": "random", "log_every": 5, "accumulate": 1}
    return classification.train("quickstart", output=output, **settings, **optimisation, **changes).run


def train_detector(data: Path, output: Path, **changes: Any) -> Path:
    stage = {"dim": 8, "depth": 1, "heads": 2, "attention": {"kind": "longformer", "window": 2}}
    options = {"channels": 8, "box_width": 8, "mask_channels": 8, "mask_layers": 1, "min_size": [48, 64]}
    settings = {
        "data": str(data),
        "model_options": {"stages": [{**stage, "patch": patch} for patch in (4, 2, 2, 2)]},
        "detector_options": {**options, "max_size": 96},
        "steps": 3,
        "batch_size": 2,
        "workers": 0,
        "neighbours": "random",
        "drop_path": 0.2,
        "optimizer": "sgd",
        "lr": 0.01,
        "warmup_steps": None,
        "warmup": 0,
        "log_every": 1,
    }
    return detection.train("quickstart", output=output, **settings, **changes).run


def write_data(folder: Path) -> None:
    generator = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 24), ("validation", 5)):
        arrays[f"{split}_x"] = generator.integers(0, 255, (count, 27, 20), dtype=np.uint8)
        arrays[f"{split}_y"] = np.arange(count) % 3
    write_npz(folder / "images.npz", **arrays)
    (folder / "garments").mkdir()
    write_garments(folder / "garments", ("train", 4), ("validation", 3))


# Tests


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_program(main_few, tmp_path_factory.mktemp("few"))


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("all")
    write_data(folder)
    return run_program(main_all, folder)


@lru_cache
def found_in(folder: Path, count: int, rank: int) -> dict[str, Results]:
    return torch.load(folder / f"{count}_{rank}.pt")


def compare(folder: Path, count: int, name: str) -> None:
    expected = expected_of(CASES[name])
    for rank in range(count):
        found = found_in(folder, count, rank)[name]
        assert found.keys() == expected.keys()
        for part, value in expected.items():
            assert_close(found[part], value, 1e-9, f"{part} in process {rank} of {count}")


@pytest.mark.parametrize("name", FEW)
def test_two_processes_compute_what_one_does(few: Path, name: str) -> None:
    compare(few, 2, name)


def test_a_refusal_is_told_by_one_process(few: Path) -> None:
    first, second = (json.loads((few / f"{rank}.json").read_text())["refusal"] for rank in (0, 1))
    sentence = (
        "spatial is 3, but the number of processes, 2, is not a multiple of it; start 3 of them with torchrun, or "
        "change spatial"
    )
    assert first == repr(ValueError(sentence))
    assert second == "SystemExit(2)"


def test_what_a_process_receives_is_what_the_cost_table_says(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two images, in a forward pass."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    from spatial_cost import received_numbers

    for rank in (0, 1):
        counted = json.loads((few / f"{rank}.json").read_text())["received"]
        assert counted == [2 * received_numbers(CASES[name].config, CASES[name].size, 2, rank) for name in FEW]


class MeshOf:
    """As much of a mesh as is looked at before anything is sent."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.ndim, self.mesh_dim_names = shape, len(shape), ("data", "spatial")[-len(shape) :]

    def size(self) -> int:
        return math.prod(self.shape)


def test_a_model_that_is_not_shared_stays_as_it_is() -> None:
    model = CASES["5 rows"].model()
    assert spatial_parallel(model, MeshOf(1)) is model
    assert type(model) is VisionLongformer


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (small_config(cfg.Longformer(2), cfg.Full()), "stage 2 has full attention, in which every token sees every"),
        (
            small_config(cfg.SpatialReduction(2)),
            "stage 1 has spatial_reduction attention, whose keys are made of the whole map; only models whose stages "
            "are Longformer can be divided among processes",
        ),
        (
            longformer(drop_rate=0.1),
            "drop_rate is 0.1, and the processes that share an image would each draw their own",
        ),
        (None, "only images of a Vision Longformer can be divided among processes; this model contains none"),
    ],
)
def test_models_that_cannot_be_divided(model: ModelConfig | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spatial_parallel(nn.Linear(2, 2) if model is None else VisionLongformer(model), MeshOf(2))


def test_a_mesh_of_two_dimensions() -> None:
    with pytest.raises(ValueError, match=r"the mesh has 2 dimensions \(data, spatial\); give the one that shares"):
        spatial_parallel(CASES["5 rows"].model(), MeshOf(2, 2))


def test_more_processes_than_chunk_rows() -> None:
    """Maps of 14 and 7 rows, in chunks of 2 and 3: 7 and 3 chunk rows."""
    model = CASES["5 rows"].model()
    check_divisible(model, 7, (27, 11))
    with pytest.raises(ValueError, match=r"8 processes cannot share images of 27×11: .* no stage has more than 7"):
        check_divisible(model, 8, (27, 11))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.dtype == torch.float64])
def test_several_processes_compute_what_one_does(everything: Path, name: str, count: int) -> None:
    compare(everything, count, name)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", ["bf16", "bf16, empty bands"])
def test_autocast_rounds_no_worse_than_in_one_process(everything: Path, name: str, count: int) -> None:
    exact, plain = expected_of(replace(CASES[name], dtype=torch.float64)), expected_of(CASES[name])
    found = found_in(everything, count, 0)[name]
    assert {part: value.dtype for part, value in found.items()} == {part: value.dtype for part, value in plain.items()}
    gradients = [part for part in exact if not part.startswith(("output", "loss"))]
    for parts in [["output 0"], ["output 1"], ["output 2"], gradients]:
        right, *rounded = (
            torch.cat([each[part].double().flatten() for part in parts]) for each in (exact, plain, found)
        )
        plain_error, error = ((each - right).norm() for each in rounded)
        assert error <= 2 * plain_error, parts


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), IN_PAIRS)
def test_pairs_with_different_images(everything: Path, name: str, strategy: str) -> None:
    """Outputs are those of a pair's own images, gradients the mean over the pairs."""
    expected = [expected_of(CASES[name], number) for number in (0, 1)]
    for rank in range(4):
        for part, value in found_in(everything, 4, rank)[f"{name}, {strategy}"].items():
            own, other = expected[rank // 2][part], expected[1 - rank // 2][part]
            right = own if part.startswith(("output", "loss")) else (own + other) / 2
            assert_close(value, right, 1e-9, f"{part} in process {rank}")


def assert_same_run(one: Path, other: Path, tolerance: float) -> None:
    first, second = (load_file(run / "last.safetensors") for run in (one, other))
    for name, weight in first.items():
        assert torch.allclose(second[name], weight, rtol=0, atol=tolerance), name
    for mine, theirs in zip(*(RunDirectory(run).records() for run in (one, other)), strict=True):
        first, second = (record.get("evaluation", {"loss": record.get("loss")}) for record in (mine, theirs))
        known = {name for name, value in first.items() if value is not None}
        assert {name for name, value in second.items() if value is not None} == known
        assert {name: second[name] for name in known} == pytest.approx({name: first[name] for name in known}, rel=1e-4)


@pytest.mark.slow
def test_a_run_of_a_pair_ends_with_the_weights_of_one_process(everything: Path, tmp_path: Path) -> None:
    one = train_classifier(everything / "images.npz", tmp_path / "one")
    assert_same_run(one, everything / "one_pair", 1e-6)


@pytest.mark.slow
def test_a_run_of_two_pairs_with_fsdp_ends_with_the_weights_of_two_processes(everything: Path) -> None:
    assert_same_run(everything / "two_processes", everything / "two_pairs", 1e-6)


@pytest.mark.slow
def test_a_run_of_a_detector(everything: Path, tmp_path: Path) -> None:
    """Every image counts once in the evaluation."""
    one = train_detector(everything / "garments", tmp_path / "one")
    assert_same_run(one, everything / "detector", 1e-5)
