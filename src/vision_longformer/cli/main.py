"""The entry point of ``vil``: the tree of commands, and what a mistake looks like."""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

from .. import __version__
from .bench import bench
from .bench_gpu import bench_gpu
from .check import check
from .convert import convert, detect_convert
from .cost import cost
from .detect.check import detect_check
from .detect.evaluate import detect_evaluate
from .detect.predict import detect_predict
from .detect.train import detect_train
from .doctor import doctor
from .encode import encode
from .evaluate import evaluate
from .explain import explain
from .export import export
from .hub import hub_push, hub_save
from .models import models
from .parser import Group, run_command
from .predict import predict
from .quantise import quantise
from .recipes import detect_recipes, recipes
from .study import study, study_show
from .table import table_cost, table_detection
from .train import train

TRACEBACK = "VIL_TRACEBACK"
"""The environment variable that, when 1, shows where a mistake was noticed."""

COMMANDS = Group(
    "Multi-Scale Vision Longformer: models, training, costs and weights.",
    {
        "doctor": doctor,
        "models": models,
        "cost": cost,
        "table": Group("The paper's tables next to our values.", {"cost": table_cost, "detection": table_detection}),
        "convert": convert,
        "bench": Group("Measure speed and memory on this machine.", {"gpu": bench_gpu}, otherwise=bench),
        "check": check,
        "recipes": recipes,
        "train": train,
        "evaluate": evaluate,
        "predict": predict,
        "encode": encode,
        "detect": Group(
            "Object detection and instance segmentation.",
            {
                "recipes": detect_recipes,
                "train": detect_train,
                "evaluate": detect_evaluate,
                "predict": detect_predict,
                "check": detect_check,
                "convert": detect_convert,
            },
        ),
        "study": Group("Run the paper's comparisons.", {"show": study_show}, otherwise=study),
        "explain": explain,
        "export": export,
        "quantise": quantise,
        "hub": Group("Models as folders, and on the Hugging Face Hub.", {"save": hub_save, "push": hub_push}),
    },
    f"Errors are reported in one sentence; {TRACEBACK}=1 in the environment also prints Python's traceback.",
)


def main(argv: list[str] | None = None) -> None:
    """Run a command line; a user's mistake is one sentence on stderr and exit code 2."""
    try:
        run_command("vil", COMMANDS, list(sys.argv[1:] if argv is None else argv), __version__)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at its exit
        raise SystemExit(1) from None
    except OSError as error:
        _fail(f"{error.strerror}: {error.filename}" if error.filename else str(error))
    except ValueError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _fail(message: str) -> NoReturn:
    """The sentence on stderr, after the traceback if the environment asks for it."""
    if os.environ.get(TRACEBACK) == "1":
        traceback.print_exc()
    print(f"vil: {message}", file=sys.stderr)
    raise SystemExit(2)
