"""The machinery of ``vil bench`` at tiny shapes: what is measured, what is refused, what is written. No speeds."""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from pathlib import Path

import pytest
import torch

from vision_longformer.bench.attention_jobs import Job, attention_job, refusal
from vision_longformer.bench.benches import BENCHES, plan
from vision_longformer.bench.estimates import Estimates
from vision_longformer.bench.flops import admitted_pairs, useful_flops
from vision_longformer.bench.fork_server import Nursery
from vision_longformer.bench.machine import differences
from vision_longformer.bench.model_jobs import build_model, model_job
from vision_longformer.bench.plans import Choices, pick_baseline
from vision_longformer.bench.plots import draw
from vision_longformer.bench.result import GroupResult, Result, Row, compare, load_result, new_path
from vision_longformer.bench.tasks import (
    BATCHED_MATMUL,
    BOTH,
    FORWARD,
    FULL_ATTENTION,
    INFERENCE,
    LARGE_MATMUL,
    REFERENCES,
    TRAINING,
    AttentionWork,
    ModelWork,
    Task,
)
from vision_longformer.bench.timing import OUT_OF_TIME, Effort, affordable, measure, plan_rounds, summary
from vision_longformer.cli.main import main
from vision_longformer.geometry import RULES, Grid
from vision_longformer.ops import IMPLEMENTATIONS
from vision_longformer.ops.reference import masked_dense
from vision_longformer.ops.spec import LocalSpec

CPU = torch.device("cpu")
TIMES = {"default": [0.2, 0.4, 0.3], "kept": [0.1, 0.2, 0.15]}


def task(variant: str = "sliding_chunk", mode: str = FORWARD, point: str = "6×9", units: int = 54) -> Task:
    work = AttentionWork(variant, 6, 9, window=2, heads=2, dim=4, side=32)
    return Task(point, variant, mode, point, (point, "sliding_chunk"), units, work)


def row(variant: str = "sliding_chunk", factor: float = 1.0, **options: object) -> Row:
    """A row whose times are ``factor`` times those of the baseline."""
    made = Row(task(variant, **options), flops=1000)
    for allocator, seconds in TIMES.items():
        made.add_time(allocator, [factor * x for x in seconds], [3, 1, 2])
    made.memory = {"inputs": 100, "outputs": 50, "extra": int(200 * factor)}
    return made


def result(*rows: Row, style: str = "lines", unit: str = "call") -> Result:
    group = GroupResult("attention", "a group", "about it", style, unit, list(rows))
    group.compute_speedups()
    machine = {"cpu": "a cpu", "cores": 2, "threads": 2, "torch": "2.8", "device": "cpu", "load_at_start": 0.0}
    return Result("attention", "2026-01-01T00:00:00", machine, {}, [group], True)


# The command


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one run of the command."""
    folder = tmp_path_factory.mktemp("bench")
    options = ["--implementations", "sliding_chunk,whole_map,tiled", "--sizes", "24x17", "--quick", "--threads", "1"]
    main(["bench", "attention", *options, "--budget", "6", "--output", str(folder)])
    return folder


def test_command_measures_every_variant(measured: Path) -> None:
    found = load_result(measured / "attention.json")
    assert found.complete
    assert found.machine["threads"] == 1
    assert found.settings["implementations"] == ["sliding_chunk", "whole_map", "tiled"]
    assert found.settings["allocators"] == ["default", "kept"]
    variants = {"sliding_chunk", "whole_map", "tiled", *REFERENCES}
    for group in found.groups:
        keys = {(r.task.variant, r.task.mode) for r in group.rows}
        assert keys == {(variant, mode) for variant in variants for mode in (FORWARD, BOTH)}
    for r in (r for _, r in found.rows()):
        assert all(times["median"] > 0 and times["rounds"] >= 1 for times in r.time.values())
        if r.task.variant == "whole_map":
            assert r.time == {}
            assert any("chunk" in reason for reason in r.reasons)
        elif not r.reasons:
            assert set(r.time) == {"default", "kept"}
            assert (r.memory is None) == ("matmul" in r.task.variant)
        else:  # a busy machine
            assert all(OUT_OF_TIME in reason for reason in r.reasons)
    extra = [r.memory["extra"] for _, r in found.rows() if r.memory]
    assert all(0 < bytes_ < 1e8 for bytes_ in extra)


def test_command_ratios_are_those_of_its_samples(measured: Path) -> None:
    group = load_result(measured / "attention.json").groups[0]
    rows = [r for r in group.rows if r.time]
    for r in rows:
        base = group.find(*r.task.baseline, r.task.mode)
        assert base is not None
        for allocator, times in r.time.items():
            if allocator in base.time:
                pairs = zip(base.time[allocator]["samples"], times["samples"], strict=False)
                assert times["speedup"] == pytest.approx(statistics.median(b / own for b, own in pairs))


def test_command_writes_plots(measured: Path) -> None:
    names = ("window-17-exact", "model-shapes")
    groups = load_result(measured / "attention.json").groups
    expected = {f"attention-{n}.png" for n, g in zip(names, groups, strict=True) if any(r.time for r in g.rows)}
    assert expected
    assert {path.name for path in measured.glob("*.png")} == expected
    assert all((measured / name).read_bytes().startswith(b"\x89PNG") for name in expected)


def test_command_leaves_earlier_results_alone(measured: Path) -> None:
    before = (measured / "attention.json").read_bytes()
    assert new_path(measured, "attention", overwrite=False).name == "attention-2.json"
    assert new_path(measured, "attention", overwrite=False).name == "attention-3.json"
    assert new_path(measured, "attention", overwrite=True).name == "attention.json"
    assert (measured / "attention.json").read_bytes() == before
    for name in ("attention-2.json", "attention-3.json"):
        (measured / name).unlink()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["atention"], ["benchmark 'atention'", "'attention'"]),
        (["attention", "--implementations", "sliding_chunks"], ["sliding_chunks", "did you mean 'sliding_chunk"]),
        (["attention", "--sizes", "56by56"], ["56by56", "56x56"]),
        (["attention", "--sizes", "0x4"], ["0x4"]),
        (["attention", "--sizes", ","], ["','"]),
        (["attention", "--baseline", "fussed"], ["baseline 'fussed'"]),
        (["windows", "--windows", "7,x"], ["'x'", "whole numbers"]),
        (["windows", "--windows", "0"], ["window is 0"]),
        (["models", "--models", "swin_tinny"], ["swin_tinny", "did you mean"]),
        (["shift", "--models", "resnet50"], ["resnet50", "random shift"]),
        (["attention", "--models", "resnet50"], ["--models does not apply", "models"]),
        (["--sizes", "28x28", "--shift"], ["does not apply to 'vil bench all'"]),
        (["attention", "--batch", "0"], ["batch is 0"]),
        (["attention", "--budget", "-1"], ["budget"]),
        (["attention", "--threads", "0"], ["threads"]),
        (["attention", "--device", "cdua"], ["device 'cdua'", "did you mean 'cuda'"]),
        (["attention", "--compare", "nowhere.json"], ["nowhere.json"]),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *arguments])
    message = capsys.readouterr().err
    assert exit_.value.code == 2
    assert message.startswith("vil: ")
    assert message.count("\n") == 1
    assert all(word in message for word in words)
    assert not Path("bench-results").exists()


# Plans


@pytest.mark.parametrize("name", list(BENCHES))
@pytest.mark.parametrize("quick", [True, False])
def test_every_plan_has_its_baselines(name: str, quick: bool) -> None:
    for group in plan(name, Choices(quick=quick))[name]:
        keys = {(t.point, t.variant, t.mode) for t in group.tasks}
        assert len(keys) == len(group.tasks)
        assert all((*t.baseline, t.mode) in keys for t in group.tasks)
        assert all(Task.from_dict(json.loads(json.dumps(t.to_dict()))) == t for t in group.tasks)


def test_attention_plan_covers_the_stated_shapes() -> None:
    points = {t.point for t in plan("attention", Choices())["attention"][1].tasks}
    assert points == {
        "56×56, batch 4, 3×32",
        "112×112, batch 1, 3×32",
        "50×84, batch 1, 6×64",
        "200×334, batch 1, 3×32",
    }


def test_only_some_figures() -> None:
    (group,) = plan("attention", Choices(), "shapes")["attention"]
    assert group.name == "model shapes"
    assert list(plan("all", Choices(), "training step")) == ["shift"]
    with pytest.raises(ValueError, match="unknown figure 'shappes'"):
        plan("attention", Choices(), "shappes")


def test_asked_baseline_is_measured_too() -> None:
    choices = Choices(implementations=("tiled",), baseline="masked_dense", sizes=((8, 8),))
    tasks = plan("attention", choices)["attention"][0].tasks
    assert {t.variant for t in tasks} == {"tiled", "masked_dense", *REFERENCES}
    assert {t.baseline[1] for t in tasks} == {"masked_dense"}
    assert pick_baseline(None, "absent", ["first", "second"]) == "first"


def test_models_plan_has_shift_in_training_only() -> None:
    choices = Choices(models=("vision_longformer_tiny", "resnet50"), sizes=((64, 64),), shift=True)
    tasks = plan("models", choices)["models"][0].tasks
    shifted = [t for t in tasks if "random shift" in t.variant]
    assert [(t.work.model, t.mode, t.work.neighbours) for t in shifted] == [
        ("vision_longformer_tiny", TRAINING, "random")
    ]


# Work


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "cyclic_release"])
def test_admitted_pairs_are_those_of_the_oracle(rule: str) -> None:
    work = AttentionWork("tiled", 7, 9, window=2, rule=rule, global_tokens=3)
    spec = LocalSpec(Grid(7, 9), 2, rule, "all", 1, 1.0)
    seen = masked_dense._seen(*(masked_dense._Axis(length, spec, CPU) for length in (7, 9)), None, spec)
    assert admitted_pairs(work) == int(seen.sum()) + 63 * 3


def test_useful_flops() -> None:
    def flops(method: str, mode: str = FORWARD) -> int | None:
        return useful_flops(Task("", "", mode, "", ("", ""), 1, AttentionWork(method, 4, 4, window=2, side=10, dim=8)))

    whole_map = 4 * 8 * 3 * 16 * 17  # every chunk sees all four
    assert flops("tiled") == flops(FULL_ATTENTION) == whole_map
    assert flops("tiled", BOTH) == 3 * whole_map
    assert flops(LARGE_MATMUL) == 2 * 10**3
    assert flops(BATCHED_MATMUL) == 4 * (3 * 4) * 4 * 37 * 8
    assert useful_flops(Task("", "", INFERENCE, "", ("", ""), 1, ModelWork("resnet50", 8, 8))) is None


@pytest.mark.parametrize("method", ["sliding_chunk", "tiled", *REFERENCES])
@pytest.mark.parametrize("mode", [FORWARD, BOTH])
def test_jobs_run(method: str, mode: str) -> None:
    work = AttentionWork(method, 6, 9, batch=2, window=2, heads=2, dim=4, side=32)
    shared: dict = {}
    job = attention_job(work, mode, CPU, shared)
    out = job.run()
    if method in ("sliding_chunk", "tiled"):
        inputs = 4 * (2 * 2 * 4 * (54 + 55 + 55) + 2 * 7 * 7 + 2 * 1)
        output = 4 * 2 * 54 * 2 * 4
        expected = (inputs, output) if mode == FORWARD else (inputs + output, output + inputs)
        assert (job.inputs, job.outputs) == expected
        assert len(out) == (5 if mode == BOTH else 2)
        assert attention_job(work, mode, CPU, shared).inputs == job.inputs
        assert len(shared) == 1


def test_random_shift_takes_neighbours_in_turn() -> None:
    works = [AttentionWork("sliding_chunk", 6, 6, window=2, neighbours=n, dim=4) for n in ("random", "all", "self")]
    shared: dict = {}
    random, every, own = (attention_job(work, FORWARD, CPU, shared) for work in works)
    outputs = [random.run() for _ in range(9)]
    assert torch.equal(outputs[0], outputs[8])
    assert not torch.equal(outputs[0], outputs[1])
    assert torch.equal(every.run(), every.run())
    assert not torch.equal(own.run(), outputs[0])


def test_refusals_are_the_implementations_own() -> None:
    work = AttentionWork("unfold_nn", 6, 9, window=2)
    assert "exact" in str(refusal(work, FORWARD, CPU))
    assert refusal(AttentionWork("unfold_nn", 6, 9, window=2, rule="exact"), BOTH, CPU) is None
    assert all(refusal(AttentionWork(method, 6, 9), FORWARD, CPU) is None for method in REFERENCES)


@pytest.mark.parametrize("method", list(IMPLEMENTATIONS))
def test_too_large_tasks_are_not_started(method: str) -> None:
    estimates = Estimates(CPU, matmul_flops=1e11, memory_limit=1e10, seconds_limit=30.0)
    big = Task("", "", BOTH, "", ("", ""), 1, AttentionWork(method, 400, 400, rule="exact", window=8))
    objection = estimates.objection(big)
    assert (objection is None) == (method not in ("masked_dense", "flex", "unfold_nn", "unfold_tensor"))
    assert estimates.objection(task(method)) is None


def test_full_attention_is_not_started_where_it_takes_forever() -> None:
    big = Task("", "", FORWARD, "", ("", ""), 1, AttentionWork(FULL_ATTENTION, 400, 400))
    assert "a run; the limit is 30 s" in str(Estimates(CPU, 1e11, 1e10, 30.0).objection(big))
    assert Estimates(CPU, 1e11, 1e10, 1e4).objection(big) is None


@pytest.mark.parametrize(("model", "mode"), [("vision_longformer_tiny", TRAINING), ("resnet18", INFERENCE)])
def test_model_jobs_run(model: str, mode: str) -> None:
    job = model_job(ModelWork(model, 32, 40, neighbours="random"), mode, CPU)
    assert job.inputs > 4 * 6e6
    job.run()


def test_models_of_fixed_size_are_padded() -> None:
    model, size = build_model(ModelWork("deit_tiny_patch16_224", 40, 50))
    assert size == (64, 64) == model.patch_embed.img_size
    assert build_model(ModelWork("resnet18", 40, 50))[1] == (40, 50)


# Measuring


def test_fresh_processes_answer_or_say_why_not() -> None:
    def function(request: dict[str, int]) -> object:
        if request["number"] == 1:
            raise RuntimeError("no")
        if request["number"] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if request["number"] == 3:
            time.sleep(60)
        return {"number": request["number"], "process": os.getpid()}

    nursery = Nursery(function)
    first, second = (nursery.ask({"number": 0}, 60) for _ in range(2))
    assert first["number"] == 0
    assert len({first["process"], second["process"], os.getpid()}) == 3
    assert nursery.ask({"number": 1}, 60) == "failed: no"
    assert nursery.ask({"number": 2}, 60) == "the process ended with -9, perhaps out of memory"
    assert nursery.ask({"number": 3}, 0.2) == "not done after 0 s"


def test_measure_takes_turns() -> None:
    calls: list[str] = []
    jobs = {index: Job(lambda name=name: calls.append(name), 0, 0) for index, name in enumerate("abc")}
    samples = measure(jobs, Effort(0.01, 3, 4, 10.0), CPU)
    rounds = len(samples[0].seconds)
    assert 3 <= rounds <= 4
    assert all(len(s.seconds) == len(s.page_faults) == rounds and s.reason is None for s in samples.values())
    turns = calls[-3 * rounds :]
    assert all(sorted(turns[start : start + 3]) == ["a", "b", "c"] for start in range(0, 3 * rounds, 3))


def test_measure_gives_reasons() -> None:
    def fail() -> None:
        raise RuntimeError("not enough memory\nat all")

    samples = measure({0: Job(fail, 0, 0), 1: Job(lambda: None, 0, 0)}, Effort(0.01, 2, 2, 10.0), CPU)
    assert samples[0].reason == "failed: not enough memory"
    assert len(samples[1].seconds) == 2
    late = {strict: measure({0: Job(lambda: None, 0, 0)}, Effort(0.0, 2, 2, -1.0, strict), CPU) for strict in (0, 1)}
    assert len(late[False][0].seconds) == 1
    assert late[True][0].reason == OUT_OF_TIME


def test_rounds_fit_the_time() -> None:
    effort = Effort(seconds=10, least=3, most=20, limit=20)
    assert plan_rounds(1.0, 10, effort) == 10
    assert plan_rounds(0.01, 10, effort) == 20
    assert plan_rounds(9.0, 10, effort) == 3
    assert affordable({0: 1.0, 1: 5.0, 2: 0.1}, 4.0, 3, ()) == [2, 0]
    assert affordable({0: 1.0, 1: 5.0, 2: 0.1}, 4.0, 3, {1}) == [2, 1]
    assert affordable({0: 1.0, 1: 5.0, 2: 0.1}, 30.0, 3, ()) == [2, 0, 1]
    assert affordable({0: 50.0}, 1.0, 3, ()) == [0]


def test_summary() -> None:
    assert summary([4.0, 1.0, 2.0, 3.0]) == {"median": 2.5, "q1": 1.75, "q3": 3.25, "best": 1.0}
    assert summary([2.0]) == {"median": 2.0, "q1": 2.0, "q3": 2.0, "best": 2.0}


# Results


def test_speedups_and_fractions() -> None:
    rows = [row(), row("tiled", 0.25), row("tiled", 0.5, point="12×18", units=216), row(LARGE_MATMUL, 2.0)]
    rows[2].task = Task("12×18", "tiled", FORWARD, "all", ("6×9", "tiled"), 216, rows[2].task.work)
    group = result(*rows).groups[0]
    assert rows[0].time["default"]["speedup"] == 1
    assert rows[1].time["kept"]["speedup"] == pytest.approx(4)
    assert rows[2].time["default"]["speedup"] == pytest.approx(0.5 * 216 / 54)  # per token
    assert rows[1].flops_per_second("default") == pytest.approx(1000 / (0.25 * 0.3))
    assert group.matmul_fraction(rows[1], "default") == pytest.approx(8)
    assert rows[1].time["default"]["page_faults"] == 2


def test_speedup_is_the_median_over_rounds() -> None:
    base, other = row(), Row(task("tiled"))
    other.add_time("default", [0.1, 4.0, 0.1], [0, 0, 0])
    result(base, other)
    assert other.time["default"]["speedup"] == pytest.approx(2)


def test_results_survive_a_file(tmp_path: Path) -> None:
    made = result(row(), row("tiled", 0.5))
    path = new_path(tmp_path / "new", "attention", overwrite=False)
    made.save(path)
    assert load_result(path).to_dict() == made.to_dict()
    assert [p.name for p in path.parent.iterdir()] == ["attention.json"]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": "another"}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a result of 'vil bench'"):
        load_result(path)


def test_compare_with_an_earlier_result() -> None:
    earlier, now = result(row(), row("tiled", 2.0)), result(row(), row("tiled", 0.5), row("tiled", 1.0, mode=BOTH))
    now.machine["threads"] = 4
    changes, different = compare(earlier, now)
    assert [change.row.task.variant for change in changes] == ["sliding_chunk", "tiled"]
    assert changes[0].speed == {"default": 1.0, "kept": 1.0}
    assert changes[1].speed["default"] == pytest.approx(4)
    assert changes[1].memory == pytest.approx(4)
    assert different == ["threads was 2, now 4"]
    assert differences(now.machine, now.machine) == []


@pytest.mark.parametrize(("style", "unit"), [("lines", "call"), ("bars", "image"), ("per_token", "token")])
def test_plots_of_any_style(style: str, unit: str, tmp_path: Path) -> None:
    unmeasured = Row(task("unfold_nn"), reasons=["it cannot"])
    rows = [row(), row("tiled", 0.5), row("tiled", 0.5, mode=BOTH), row(FULL_ATTENTION, 3.0), unmeasured]
    (path,) = draw(result(*rows, style=style, unit=unit), tmp_path / "attention")
    assert path.name == "attention-a-group.png"
    assert path.stat().st_size > 10_000
    assert draw(result(unmeasured, style=style), tmp_path / "attention") == []
