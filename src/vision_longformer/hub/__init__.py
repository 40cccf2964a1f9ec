"""Models as folders of weights, configuration and model card, on this machine or on the Hugging Face Hub."""

from .folder import from_pretrained, save_pretrained
from .push import push_to_hub

__all__ = ["from_pretrained", "push_to_hub", "save_pretrained"]
