"""``python -m vision_longformer`` is ``vil``, for launchers such as torchrun that start modules."""

from .cli.main import main

main()
