"""Images larger than memory, or than one process: a model computed strip by strip, exactly, with its tokens in memory
or in files, or over several processes."""

from typing import TYPE_CHECKING

from ..lazy import lazy_exports

if TYPE_CHECKING:
    from .encode import encode
    from .reading import LargeImage, open_image
    from .spatial import spatial_parallel
    from .stream import Progress, Streamed, stream

__all__ = ["LargeImage", "Progress", "Streamed", "encode", "open_image", "spatial_parallel", "stream"]

lazy_exports(
    __name__,
    {
        ".encode": ["encode"],
        ".reading": ["LargeImage", "open_image"],
        ".spatial": ["spatial_parallel"],
        ".stream": ["Progress", "Streamed", "stream"],
    },
)
