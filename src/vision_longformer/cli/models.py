"""``vil models``."""

from __future__ import annotations

from fnmatch import fnmatchcase

from ..errors import unknown_name
from .output import billions, millions, print_json, print_table, size_text


def models(pattern: str = "*", /, *, json: bool = False) -> None:
    """List the named models with their parameters and MACs.

    Both are counted as in the paper, at the model's own image size.

    Args:
        pattern: only names that match, such as 'vision_longformer*'; all by default.
        json: print JSON.
    """
    from ..costs.formulas import count_parameters, paper_macs
    from ..models.zoo import MODELS

    chosen = {name: config for name, config in MODELS.items() if fnmatchcase(name, pattern)}
    if not chosen:
        raise unknown_name("model", pattern, MODELS)
    rows = [
        (name, config.img_size, count_parameters(config).paper, paper_macs(config).total)
        for name, config in chosen.items()
    ]
    if json:
        print_json([{"model": n, "img_size": s, "params": p, "macs": m} for n, s, p, m in rows])
        return
    texts = [(name, size_text(size), millions(params), billions(macs)) for name, size, params, macs in rows]
    print_table(f"{len(rows)} models", ("model", "image", "parameters (M)", "GMACs"), texts)
