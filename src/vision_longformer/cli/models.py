"""``vil models``."""

from __future__ import annotations

from fnmatch import fnmatchcase

from .output import billions, millions, print_json, print_table, progress, size_text


def models(pattern: str = "*", /, *, json: bool = False) -> None:
    """List the named models with their parameters and MACs.

    Both are counted as in the paper, at the model's own image size.

    Args:
        pattern: only names that match, such as 'vision_longformer*'.
        json: print JSON.
    """
    from ..costs import count_parameters, paper_macs
    from ..errors import unknown_name
    from ..models.zoo import MODELS

    names = [name for name in MODELS if fnmatchcase(name, pattern)]
    if not names:
        raise unknown_name("model", pattern, MODELS)
    rows = []
    for name in progress(names, "counting"):
        config = MODELS[name]
        rows.append((name, config.img_size, count_parameters(config).paper, paper_macs(config).total))
    if json:
        print_json([{"model": n, "img_size": s, "params": p, "macs": m} for n, s, p, m in rows])
        return
    texts = [(name, size_text(size), millions(params), billions(macs)) for name, size, params, macs in rows]
    print_table(f"{len(rows)} models", ("model", "image", "parameters (M)", "GMACs"), texts)
