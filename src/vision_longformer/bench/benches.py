"""All benchmarks."""

from __future__ import annotations

from ..errors import check_choice, unknown_name
from .plan_attention import plan_attention, plan_rules, plan_scaling, plan_windows
from .plan_models import plan_models, plan_shift
from .plans import Bench, Choices
from .tasks import Group

BENCHES = {
    "attention": Bench(plan_attention, ("implementations", "sizes", "baseline", "batch"), 34, 900),
    "rules": Bench(plan_rules, ("implementations", "sizes", "batch"), 5, 300),
    "windows": Bench(plan_windows, ("implementations", "sizes", "windows", "batch"), 5, 300),
    "shift": Bench(plan_shift, ("implementations", "sizes", "models", "batch"), 10, 300),
    "models": Bench(plan_models, ("implementations", "sizes", "models", "baseline", "batch", "shift"), 18, 1800),
    "scaling": Bench(plan_scaling, ("implementations", "sizes", "batch"), 7, 600),
}
ALL = "all"


def plan(what: str, choices: Choices, only: str | None = None) -> dict[str, list[Group]]:
    """The groups of a benchmark, or of all of them; a choice that it does not heed is refused.

    ``only`` keeps the groups with this in their name.
    """
    check_choice("benchmark", what, (ALL, *BENCHES))
    names = tuple(BENCHES) if what == ALL else (what,)
    for option in ("implementations", "sizes", "models", "windows", "baseline", "batch", "shift"):
        if getattr(choices, option) and not all(option in BENCHES[name].heeds for name in names):
            takers = ", ".join(name for name, bench in BENCHES.items() if option in bench.heeds)
            raise ValueError(f"--{option} does not apply to 'vil bench {what}', but to one of {takers}")
    plans = {name: BENCHES[name].plan(choices) for name in names}
    if only is None:
        return plans
    kept = {name: [group for group in groups if only in group.name] for name, groups in plans.items()}
    if not any(kept.values()):
        raise unknown_name("figure", only, (group.name for groups in plans.values() for group in groups))
    return {name: groups for name, groups in kept.items() if groups}


def default_budget(name: str, quick: bool) -> float:
    """Seconds that a benchmark is meant to take."""
    return BENCHES[name].quick_seconds if quick else BENCHES[name].seconds
