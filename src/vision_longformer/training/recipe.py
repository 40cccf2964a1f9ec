"""Recipes: the settings of a run as a frozen dataclass, and the small YAML files that change its defaults.

A task's recipe is a subclass of :class:`BackboneSettings` with flat keys. A shipped recipe is a file in
``recipes/TASK/`` or, where it differs from another by a line or two, an entry of the subclass's ``generated`` table.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from ..errors import check_at_least, check_choice, check_fraction, unknown_name
from ..models.config import NEIGHBOURS, ModelConfig
from ..models.zoo import model_options, nearest_model

if TYPE_CHECKING:
    from ..data.order import Batching, Process

OPTIMIZERS = ("adamw", "sgd", "release_adamw", "release_qhm")
SCHEDULES = ("cosine", "linear", "multistep", "constant", "release_cosine")
PRECISIONS = ("fp32", "bf16", "fp16")
DECAYS = ("matrices", "release", "all")
STRATEGIES = ("ddp", "fsdp")

QUICK_START = "quickstart"
"""The recipe of every task that needs no data but the built-in."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of a training run.

    Args:
        about: what the recipe is for, in a line.
        seed: seeds everything random; the same seed gives the same run.
        epochs: passes over the training set.
        steps: stop after this many optimiser steps instead of whole epochs.
        batch_size: images per optimiser step, over all processes.
        accumulate: parts into which a process splits its share of the batch, to save memory.
        precision: fp32, bf16 or fp16.
        compile: compile the model with torch.compile.
        grad_checkpointing: recompute blocks in backward, to save memory; strips: strip by strip, to save more.
        strategy: over several processes, ddp, or fsdp (FSDP2) to shard parameters.
        spatial: processes that share each image, for images too large for one; it must divide the number of processes.
        optimizer: adamw, sgd; release_adamw and release_qhm step as the authors' release does.
        lr: peak learning rate.
        lr_batch: the batch size that lr is stated for; lr is then scaled to batch_size. None: lr is not scaled.
        beta2: decay of the squared gradients of adamw and release_adamw.
        momentum: for sgd and release_qhm.
        weight_decay: strength of weight decay; decoupled for adamw.
        decay: what weight decay applies to: matrices (not biases, norms, tokens or position tables), release (the same
            parameters as in the authors' release) or all.
        clip_norm: largest norm of the whole gradient; None for no limit.
        schedule: cosine, linear, multistep, constant; release_cosine counts the steps of warm-up too.
        warmup: epochs of linear warm-up.
        warmup_steps: optimiser steps of linear warm-up, instead of epochs.
        warmup_factor: the first step's learning rate, as a fraction of lr.
        min_lr: learning rate at the end of the schedule.
        milestones: for multistep, the fractions of the run at which the rate falls to a tenth.
        ema: decay of an exponential moving average of the weights, which is then evaluated and saved; None for none.
        workers: data-loading processes.
        timeout_minutes: over several processes, how long one may wait for another before the run ends.
        checkpoint_minutes: time between checkpoints; there is one after each epoch as well.
        log_every: steps between lines of metrics.
        eval_every: epochs between evaluations.
        patience: stop after this many evaluations without improvement; None to train to the end.
        phase_start: the step at which a finished run was given more epochs, and its schedule started anew.
    """

    about: str = ""
    seed: int = 0
    epochs: int = 300
    steps: int | None = None
    batch_size: int = 1024
    accumulate: int = 1
    precision: str = "fp32"
    compile: bool = False
    grad_checkpointing: bool | Literal["strips"] = False
    strategy: str = "ddp"
    spatial: int = 1
    optimizer: str = "adamw"
    lr: float = 1e-3
    lr_batch: int | None = None
    beta2: float = 0.999
    momentum: float = 0.9
    weight_decay: float = 0.1
    decay: str = "matrices"
    clip_norm: float | None = None
    schedule: str = "cosine"
    warmup: float = 5.0
    warmup_steps: int | None = None
    warmup_factor: float = 0.002
    min_lr: float = 1e-6
    milestones: tuple[float, ...] = ()
    ema: float | None = None
    workers: int = 2
    timeout_minutes: float = 30.0
    checkpoint_minutes: float = 10.0
    log_every: int = 50
    eval_every: int = 1
    patience: int | None = None
    phase_start: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "spatial", "log_every", "eval_every"):
            check_at_least(name, getattr(self, name), 1)
        for name in ("seed", "workers", "phase_start"):
            check_at_least(name, getattr(self, name), 0)
        for name in ("steps", "lr_batch", "warmup_steps", "patience"):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 1)
        for name, choices in (
            ("precision", PRECISIONS),
            ("optimizer", OPTIMIZERS),
            ("schedule", SCHEDULES),
            ("decay", DECAYS),
            ("strategy", STRATEGIES),
        ):
            check_choice(name, getattr(self, name), choices)
        if self.grad_checkpointing not in (True, False, "strips"):
            raise ValueError(f"grad_checkpointing is {self.grad_checkpointing!r}; it must be true or false or strips")
        if self.grad_checkpointing == "strips" and self.strategy == "fsdp":
            raise ValueError("grad_checkpointing strips needs whole parameters; use strategy ddp with it, not fsdp")
        if self.spatial > 1 and self.compile:
            raise ValueError("spatial shares images between processes, which cannot be compiled; leave out compile")
        if self.lr <= 0:
            raise ValueError(f"lr is {self.lr}; it must be positive")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError(f"clip_norm is {self.clip_norm}; it must be positive, or null for no limit")
        for name in ("weight_decay", "warmup", "min_lr", "checkpoint_minutes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.timeout_minutes <= 0:
            raise ValueError(f"timeout_minutes is {self.timeout_minutes}; it must be positive")
        if self.ema is not None and not 0 <= self.ema < 1:
            raise ValueError(f"ema is {self.ema}; it must be at least 0 and below 1, such as 0.9999")
        if list(self.milestones) != sorted(self.milestones) or not all(0 < at < 1 for at in self.milestones):
            raise ValueError(f"milestones are {self.milestones}; give rising fractions of the run, as [0.66, 0.88]")
        if self.schedule == "multistep" and not self.milestones:
            raise ValueError("schedule multistep needs milestones, as [0.66, 0.88]; without them the rate never falls")

    @property
    def micro_batch_multiple(self) -> int:
        """Images of a micro-batch are a multiple of this."""
        return 1

    def batching(self, process: Process) -> Batching:
        """How a process takes part in every batch."""
        from ..data.order import Batching  # which imports torch

        return Batching(self.batch_size, self.accumulate, process, self.micro_batch_multiple)

    def count_warmup(self, steps_per_epoch: int) -> int:
        """Steps of warm-up."""
        return round(self.warmup * steps_per_epoch) if self.warmup_steps is None else self.warmup_steps

    @property
    def scaled_lr(self) -> float:
        """The peak learning rate for this batch size."""
        return self.lr * self.batch_size / self.lr_batch if self.lr_batch else self.lr


@dataclass(frozen=True, kw_only=True)
class BackboneSettings(TrainSettings):
    """Settings of a run that trains a Vision Longformer.

    Args:
        model: a name from 'vil models'.
        model_options: fields of its configuration to change, such as {"global_pool": "token"}; stages as data.
        drop_path: rate of dropped residual branches in the last block; it grows linearly with depth.
        neighbours: what local attention sees in training: all, self, or random (random shift).
        shift_until: with random, the fraction of the run after which all neighbours are seen.
        eval_fraction: hold out this fraction of the training images for evaluation; None: 0.15 of them if the data has
            no evaluation split, otherwise none.
        auto: derive settings that are not given from the data and the machine, as for data of your own.
    """

    task: ClassVar[str]
    """The folder of its recipes."""
    run_prefix: ClassVar[str] = ""
    """What the names of its run directories start with."""
    generated: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Shipped recipes that are not files: what they change of their ``base``, by name."""
    own_data: ClassVar[str]
    """The recipe with ``auto`` for data of one's own."""
    derived: ClassVar[frozenset[str]] = frozenset()
    """The settings that it leaves open, to be derived from the data and the machine."""

    model: str = "vision_longformer_tiny"
    model_options: dict[str, Any] = field(default_factory=dict)
    drop_path: float = 0.1
    neighbours: str = "all"
    shift_until: float = 0.75
    eval_fraction: float | None = None
    auto: bool = False

    @classmethod
    def default_name(cls, changes: Mapping[str, Any]) -> str:
        """The recipe of a run for which none is named: that for data of one's own if there is any."""
        return cls.own_data if "data" in changes else QUICK_START

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_fraction is not None and not 0 < self.eval_fraction < 1:
            raise ValueError(f"eval_fraction is {self.eval_fraction}; it must be above 0 and below 1")
        check_choice("neighbours", self.neighbours, NEIGHBOURS)
        for name in ("drop_path", "shift_until"):
            check_fraction(name, getattr(self, name))


def named_model(config: ModelConfig) -> dict[str, Any]:
    """``model`` and ``model_options`` that make a configuration, but for what other settings decide."""
    name = nearest_model(config)
    options = model_options(name, config)
    return {"model": name, "model_options": options} if options else {"model": name}


R = TypeVar("R", bound=BackboneSettings)

SHIPPED = Path(__file__).parents[1] / "recipes"
"""One folder of files per task."""

BASE = "base"
"""The key that names the recipe of which a file states the differences."""


Derive = Callable[[Mapping[str, Any]], dict[str, Any]]
"""From the values that are given to some of those that are not."""


def resolve(recipe_type: type[R], recipe: str | BackboneSettings, derive: Derive | None = None, **changes: Any) -> R:
    """The settings of a recipe, given by name, as a .yaml file or as settings, with some of them changed.

    A recipe with ``auto`` leaves settings open, and fields of settings such as ``detector_options``, which ``derive``
    then fills in.
    """
    if isinstance(recipe, recipe_type):
        return replace(recipe, **override({}, changes))
    name = str(recipe)
    values = override(load_recipe(recipe_type, name), changes)
    if derive is not None and values.get("auto"):
        derived = derive(values)
        given = {key: {**derived.get(key, {}), **value} for key, value in values.items() if isinstance(value, dict)}
        values = override(derived, {**values, **given})
    return build(recipe_type, values, f"recipe {name}")


IN_STEPS = {"epochs": "steps", "warmup": "warmup_steps"}
"""Lengths in epochs, and the settings that state them in steps and take precedence."""


def override(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with ``changes``; a length that is changed in epochs is no longer stated in steps."""
    no_longer = {steps: None for epochs, steps in IN_STEPS.items() if epochs in changes}
    return {**values, **no_longer, **changes}


def recipe_names(recipe_type: type[BackboneSettings]) -> list[str]:
    """The shipped recipes of a task."""
    return sorted({*recipe_type.generated, *(path.stem for path in (SHIPPED / recipe_type.task).glob("*.yaml"))})


def load_recipe(recipe_type: type[BackboneSettings], name_or_path: str) -> dict[str, Any]:
    """What a recipe changes of the defaults, by key: a shipped one by name, or a ``.yaml`` file.

    A file may start from another by ``base: NAME``, or by a path as seen from its own folder. A key of the file
    replaces that of its base as a whole, ``model_options`` too. What a base is ``about`` does not hold for the file.
    """
    values: dict[str, Any] = {}
    chain: list[str] = []
    following: str | None = name_or_path
    while following is not None:
        chain.append(following)
        if following in chain[:-1]:
            raise ValueError(f"recipe {' → '.join(chain)} is its own base; a chain of bases must end")
        delta = _delta(recipe_type, following)
        base = delta.pop(BASE, None)
        if len(chain) > 1:
            delta.pop("about", None)
        values = override(delta, values)
        following = None if base is None else _beside(following, base)
    return values


def _delta(recipe_type: type[BackboneSettings], name_or_path: str) -> dict[str, Any]:
    """What one recipe changes of its base."""
    if _is_path(name_or_path):
        return _parse(name_or_path, _read(Path(name_or_path)))
    if name_or_path in recipe_type.generated:
        return dict(recipe_type.generated[name_or_path])
    names = recipe_names(recipe_type)
    if name_or_path not in names:
        if Path(name_or_path).exists():
            raise ValueError(f"{name_or_path} is not a recipe; did you mean --data {name_or_path}?")
        raise unknown_name("recipe", name_or_path, names)
    return _parse(name_or_path, _read(SHIPPED / recipe_type.task / f"{name_or_path}.yaml"))


def _read(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"there is no recipe file {path}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start}") from error


def _is_path(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _beside(recipe: str, base: object) -> str:
    """The base that ``recipe`` names, a path taken from its folder."""
    if not isinstance(base, str):
        raise ValueError(f"{recipe}: {BASE} is {base!r}; it must be the name of a recipe or a .yaml file")
    return os.path.normpath(Path(recipe).parent / base) if _is_path(base) else base


def _parse(recipe: str, text: str) -> dict[str, Any]:
    try:
        data = yaml.load(text, RecipeLoader)
    except yaml.MarkedYAMLError as error:
        line = 1 + (error.problem_mark.line if error.problem_mark else 0)
        raise ValueError(f"{recipe}, line {line}: {error.problem}; write lines of 'key: value'") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{recipe} is not YAML: {' '.join(str(error).split())}") from error
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ValueError(f"{recipe} is not a recipe; write lines of 'key: value'")
    return data


def parse_values(texts: Mapping[str, str]) -> dict[str, Any]:
    """Values from a command line, each read as it would be in a file; what is not YAML is text."""
    values: dict[str, Any] = {}
    for key, text in texts.items():
        try:
            values[key] = yaml.load(text, RecipeLoader)
        except yaml.YAMLError:
            values[key] = text
    return values


def build(cls: type[R], values: Mapping[str, Any], source: str) -> R:
    """The dataclass ``cls`` with ``values`` for some of its fields, as YAML gives them; messages name ``source``."""
    types = get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    converted = {}
    for key, value in values.items():
        if key not in names:
            raise ValueError(f"{source}: {unknown_name('key', key, names)}")
        try:
            converted[key] = as_type(value, types[key])
        except TypeError:
            raise ValueError(f"{source}: {key} is {value!r}; it must be {in_words(types[key])}") from None
    try:
        return cls(**converted)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from error


def to_yaml(recipe: Any, *, changed_only: bool = False) -> str:
    """A recipe as a file that :func:`load_recipe` reads: every field, or only those that differ from the defaults."""
    values = asdict(recipe)
    if changed_only:
        values = {field.name: values[field.name] for field in fields(recipe) if _changed(recipe, field)}
    return yaml.dump(values, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True, width=math.inf)


def _changed(recipe: Any, field: Field[Any]) -> bool:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return bool(getattr(recipe, field.name) != default)


# Values between YAML and dataclass fields


class RecipeLoader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as it is everywhere else; PyYAML wants 1.0e-3."""


class RecipeDumper(yaml.SafeDumper):
    """Lists on one line; quotes around strings that :class:`RecipeLoader` would read as numbers."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        return super().represent_sequence(tag, sequence, flow_style=True)


for _class in (RecipeLoader, RecipeDumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def as_type(value: Any, expected: Any) -> Any:
    """``value`` for a field of type ``expected``: whole numbers become floats, and lists tuples, where it has them.

    A pair of integers may be written as 96x128. TypeError if it is something else.
    """
    origin, options = get_origin(expected), get_args(expected)
    if origin in (Union, UnionType) and (value is not None or type(None) in options):
        return None if value is None else _as_any(value, _not_none(options))
    if expected == tuple[int, int] and re.fullmatch(r"\d+x\d+", str(value)):
        return tuple(map(int, value.split("x")))
    if origin is tuple and isinstance(value, (list, tuple)):
        items = options[:1] * len(value) if options[-1] is ... else options
        if len(items) == len(value):
            return tuple(as_type(item, option) for item, option in zip(value, items, strict=True))
    elif expected is float:
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    elif type(value) is (origin or expected) or (origin is Literal and value in options):
        return value
    raise TypeError(f"{value!r} is not {in_words(expected)}")


def _as_any(value: Any, options: Sequence[Any]) -> Any:
    """``value`` for the first of several types that it is right for."""
    for option in options[:-1]:
        with suppress(TypeError):
            return as_type(value, option)
    return as_type(value, options[-1])


def in_words(expected: Any) -> str:
    """What a type asks for, as a sentence would say it."""
    origin, options = get_origin(expected), get_args(expected)
    if origin in (Union, UnionType):
        choices = " or ".join(map(in_words, _not_none(options)))
        return f"{choices}, or null" if type(None) in options else choices
    if origin is Literal:
        return " or ".join(options)
    if origin is tuple:
        return "a list of numbers" if options[-1] is ... else f"a list of {len(options)} numbers"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", dict: "keys with values"}
    return words[origin or expected]


def _not_none(options: tuple[Any, ...]) -> list[Any]:
    """The types beside None in an optional one."""
    return [option for option in options if option is not type(None)]
