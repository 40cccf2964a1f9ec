"""Optimisers, schedules and parameter groups, against traces of the authors' release and values worked out by hand."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from vision_longformer import VisionLongformer
from vision_longformer.checkpoint.release import release_config
from vision_longformer.checkpoint.release_names import model_names
from vision_longformer.models.config import Linformer, Longformer, ModelConfig, StageConfig
from vision_longformer.training.optimizer import (
    QuasiHyperbolicMomentum,
    ReleaseAdamW,
    build_optimizer,
    learning_rate,
    parameter_groups,
)
from vision_longformer.training.recipe import OPTIMIZERS, TrainSettings

DATA = Path(__file__).parents[1] / "assets"
TRACES: dict[str, Any] = json.loads((DATA / "optim.json").read_text())
RELEASED: dict[str, Any] = json.loads(gzip.decompress((DATA / "checkpoint_keys.json.gz").read_bytes()))["models"]
RELEASE_EXEMPT = ("pos_embed", "cls_token", "norm.weight", "norm.bias", "norm_embed", "head.bias", "relative_position")

Make = Callable[[Iterable[Any]], Optimizer]


def _run(make: Make, start: Tensor, gradients: Iterable[Tensor | None]) -> list[Tensor]:
    """The parameter after each step."""
    parameter = nn.Parameter(start.clone())
    optimizer = make([parameter])
    path = []
    for gradient in gradients:
        parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()
        path.append(parameter.detach().clone())
    return path


def _tensor(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Optimisers


@pytest.mark.parametrize(
    ("trace", "make"),
    [
        ("adamw_lr1e-2_wd0.1_eps1e-8", lambda p: ReleaseAdamW(p, lr=1e-2, weight_decay=0.1)),
        ("qhm_lr1e-2_mom0.9_nu1_wd0", lambda p: QuasiHyperbolicMomentum(p, lr=1e-2)),
        ("qhm_lr1e-2_mom0.9_nu0.7_wd0.05", lambda p: QuasiHyperbolicMomentum(p, lr=1e-2, nu=0.7, weight_decay=0.05)),
    ],
)
def test_steps_of_the_release(trace: str, make: Make) -> None:
    path = _run(make, _tensor(TRACES["p0"]), _tensor(TRACES["grads"]))
    torch.testing.assert_close(torch.stack(path), _tensor(TRACES[trace]), rtol=0, atol=1e-12)


def test_quasi_hyperbolic_momentum_is_sgd_at_a_tenth_of_the_rate() -> None:
    start, gradients = _tensor(TRACES["p0"]), _tensor(TRACES["grads"])
    ours = _run(lambda p: QuasiHyperbolicMomentum(p, lr=0.03), start, gradients)
    sgd = _run(lambda p: torch.optim.SGD(p, lr=0.003, momentum=0.9), start, gradients)
    torch.testing.assert_close(ours, sgd, rtol=0, atol=1e-15)


def test_parameters_without_gradient_wait() -> None:
    """Beside others, a parameter steps as it would alone: its bias correction counts its own steps."""
    gradients = [*_tensor(TRACES["grads"])]
    rare = [gradient if index % 2 else None for index, gradient in enumerate(gradients)]
    first, second = nn.Parameter(_tensor(TRACES["p0"])), nn.Parameter(_tensor(TRACES["p0"]))
    optimizer = ReleaseAdamW([first, second], lr=1e-2)
    for often, seldom in zip(gradients, rare, strict=True):
        first.grad, second.grad = often, seldom
        optimizer.step()
    for parameter, taken in ((first, gradients), (second, rare)):
        alone = _run(lambda p: ReleaseAdamW(p, lr=1e-2), _tensor(TRACES["p0"]), taken)
        torch.testing.assert_close(parameter.detach(), alone[-1], rtol=0, atol=0)
    assert optimizer.state[second]["step"] == 3


def test_closure() -> None:
    parameter = nn.Parameter(torch.tensor([2.0]))
    optimizer = QuasiHyperbolicMomentum([parameter], lr=0.5)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = (parameter**2).sum()
        value.backward()
        return value

    assert optimizer.step(loss).item() == 4
    assert parameter.item() == pytest.approx(2 - 0.5 * 0.1 * 4)


def _trained(optimizer: str, steps: int) -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 0.25)
    built = build_optimizer(parameter_groups(model, 0.1, "matrices"), TrainSettings(optimizer=optimizer, lr=0.01))
    _train(model, built, range(steps))
    return model, built


def _train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        images = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        model(images).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("distributed", [False, True])
def test_state_survives(name: str, distributed: bool) -> None:
    """Three steps, state into a new optimiser, three more: bit for bit as six in one go."""
    whole, _ = _trained(name, 6)
    half, optimizer = _trained(name, 3)
    resumed, restored = _trained(name, 0)
    resumed.load_state_dict(half.state_dict())
    if distributed:
        set_optimizer_state_dict(resumed, restored, get_optimizer_state_dict(half, optimizer))
    else:
        restored.load_state_dict(optimizer.state_dict())
    _train(resumed, restored, range(3, 6))
    assert not torch.equal(half.weight, whole.weight)  # type: ignore[arg-type]
    for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sharded_parameters(name: str, one_process: DeviceMesh) -> None:
    """FSDP2's tensors step as plain ones do."""
    plain, _ = _trained(name, 4)
    model, _ = _trained(name, 0)
    fully_shard(model, mesh=one_process)
    settings = TrainSettings(optimizer=name, lr=0.01)
    _train(model, build_optimizer(parameter_groups(model, 0.1, "matrices"), settings), range(4))
    for sharded, parameter in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(sharded, DTensor)
        torch.testing.assert_close(sharded.full_tensor(), parameter)


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("adamw", torch.optim.AdamW),
        ("sgd", torch.optim.SGD),
        ("release_adamw", ReleaseAdamW),
        ("release_qhm", QuasiHyperbolicMomentum),
    ],
)
def test_built_as_the_settings_say(name: str, cls: type[Optimizer]) -> None:
    settings = TrainSettings(optimizer=name, lr=1e-3, lr_batch=512, batch_size=2048, momentum=0.8, beta2=0.95)
    optimizer = build_optimizer(parameter_groups(nn.Linear(2, 2), 0.3, "matrices"), settings)
    assert type(optimizer) is cls
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(4e-3, 0.3), (4e-3, 0.0)]
    expected = {"betas": (0.9, 0.95)} if "adamw" in name else {"momentum": 0.8}
    assert [group | expected for group in optimizer.param_groups] == optimizer.param_groups
    assert not any(group.get("nesterov") for group in optimizer.param_groups)


# Parameter groups

GROUPED = ModelConfig(
    (
        StageConfig(8, 1, 2, 4, Longformer(window=2), 1, "relative"),
        StageConfig(8, 1, 2, 2, Linformer(4), 1, "absolute"),
    ),
    img_size=(16, 16),
    num_classes=3,
)
MATRICES = {
    "stages.0.patch_embed.proj.weight",
    "stages.0.blocks.0.attn.qkv.weight",
    "stages.0.blocks.0.attn.proj.weight",
    "stages.0.blocks.0.mlp.fc1.weight",
    "stages.0.blocks.0.mlp.fc2.weight",
    "stages.1.patch_embed.proj.weight",
    "stages.1.blocks.0.attn.qkv.weight",
    "stages.1.blocks.0.attn.proj.weight",
    "stages.1.blocks.0.attn.project_keys",
    "stages.1.blocks.0.mlp.fc1.weight",
    "stages.1.blocks.0.mlp.fc2.weight",
    "head.weight",
}
BIASES = {
    f"stages.{stage}.{layer}.bias"
    for stage in (0, 1)
    for layer in ("patch_embed.proj", "blocks.0.attn.qkv", "blocks.0.attn.proj", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2")
}


def _grouped(model: nn.Module, decay: str) -> dict[float, set[str]]:
    """Names of parameters by their decay."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, 0.1, decay)
    assert len({group["weight_decay"] for group in groups}) == len(groups)
    return {group["weight_decay"]: {names[id(parameter)] for parameter in group["params"]} for group in groups}


@pytest.mark.parametrize(("decay", "decayed"), [("matrices", MATRICES), ("release", MATRICES | BIASES)])
def test_what_decays(decay: str, decayed: set[str]) -> None:
    model = VisionLongformer(GROUPED)
    everything = {name for name, _ in model.named_parameters()}
    assert _grouped(model, decay) == {0.1: decayed, 0.0: everything - decayed}
    assert _grouped(model, "all") == {0.1: everything}


def test_frozen_parameters_are_left_out() -> None:
    model = VisionLongformer(GROUPED)
    model.stages.requires_grad_(False)
    assert _grouped(model, "matrices") == {0.1: {"head.weight"}, 0.0: {"head.bias", "norm.weight", "norm.bias"}}


def test_models_that_exempt_nothing() -> None:
    assert _grouped(nn.Linear(2, 2), "matrices") == {0.1: {"weight"}, 0.0: {"bias"}}


def test_unknown_decay() -> None:
    with pytest.raises(ValueError, match="unknown decay 'matrix'; did you mean 'matrices'"):
        parameter_groups(nn.Linear(2, 2), 0.1, "matrix")


@pytest.mark.parametrize("name", RELEASED)
def test_release_groups_of_real_configurations(name: str) -> None:
    """The release's rule on the release's names, for each of the parts that ours are made of."""
    entry = RELEASED[name]
    config = release_config(entry["arch"], img_size=entry["img_size"], **entry["args"])
    with torch.device("meta"):
        model = VisionLongformer(config)
    sources = model_names(config).sources
    exempt = set()
    for ours, _ in model.named_parameters():
        answers = {any(pattern in part for pattern in RELEASE_EXEMPT) for part in sources[ours].parts}
        assert len(answers) == 1
        exempt |= {ours} if answers == {True} else set()
    assert _grouped(model, "release")[0.0] == exempt


# Schedules


@pytest.mark.parametrize(
    ("trace", "settings"),
    [
        ("cosine_max100_min1e-6_wf0.002_wi10", TrainSettings(schedule="release_cosine")),
        ("linear_max100_min1e-6_wf0.002_wi10", TrainSettings(schedule="linear")),
        (
            "multistep_30_60_g0.1_wf0.333_wi10",
            TrainSettings(schedule="multistep", milestones=(0.3, 0.6), warmup_factor=1 / 3),
        ),
    ],
)
def test_rates_of_the_release(trace: str, settings: TrainSettings) -> None:
    rates = [learning_rate(settings, step, total=100, warmup=10) for step in range(len(TRACES[trace]))]
    torch.testing.assert_close(_tensor(rates), _tensor(TRACES[trace]), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("schedule", "step", "rate"),
    [
        ("cosine", 0, 0.1),
        ("cosine", 5, 0.55),
        ("cosine", 10, 1.0),
        ("cosine", 40, 0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2),
        ("cosine", 70, 0.6),
        ("cosine", 130, 0.2),
        ("cosine", 500, 0.2),
        ("linear", 10, 1.0),
        ("linear", 40, 0.8),
        ("linear", 130, 0.2),
        ("constant", 5, 0.55),
        ("constant", 129, 1.0),
        ("multistep", 5, 0.55),
        ("multistep", 64, 1.0),
        ("multistep", 65, 0.1),
        ("multistep", 103, 0.1),
        ("multistep", 104, 0.01),
        ("release_cosine", 9, 0.91),
        ("release_cosine", 10, 0.2 + 0.8 * (1 + math.cos(math.pi / 13)) / 2),
        ("release_cosine", 65, 0.6),
        ("release_cosine", 130, 0.2),
    ],
)
def test_rates_by_hand(schedule: str, step: int, rate: float) -> None:
    """130 steps with 10 of warm-up from a tenth; the rate 0.5 is for batches of 512, and there are 1,024."""
    settings = TrainSettings(
        schedule=schedule, lr=0.5, lr_batch=512, warmup_factor=0.1, min_lr=0.2, milestones=(0.5, 0.8)
    )
    assert learning_rate(settings, step, total=130, warmup=10) == pytest.approx(rate, abs=1e-12)


def test_milestones_between_steps() -> None:
    """0.07 of 100 is a little more than 7 in floating point."""
    settings = TrainSettings(schedule="multistep", milestones=(0.07,), lr=1.0)
    assert [learning_rate(settings, step, total=100, warmup=0) for step in (6, 7)] == [1.0, 0.1]


def test_runs_that_only_warm_up() -> None:
    settings = TrainSettings(lr=1.0, warmup_factor=0.0)
    assert [learning_rate(settings, step, total=3, warmup=6) for step in range(3)] == [0.0, 1 / 6, 1 / 3]
    assert learning_rate(settings, 3, total=3, warmup=3) == 1.0
