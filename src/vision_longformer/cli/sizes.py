"""Image sizes as users write them."""

from __future__ import annotations

import re


def parse_size(text: str) -> tuple[int, int]:
    """``"1065x1600"`` or ``"224"`` as (height, width)."""
    from ..config import size_pair

    match = re.fullmatch(r"(\d+)(?:[xX×](\d+))?", text.strip())
    if match is None:
        raise ValueError(f"image size is {text!r}; write HEIGHTxWIDTH such as 1065x1600, or one number for a square")
    height, width = match.groups()
    return size_pair((int(height), int(width or height)))


def size_text(size: tuple[int, int]) -> str:
    return f"{size[0]}×{size[1]}"
