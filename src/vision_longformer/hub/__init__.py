"""Models as folders of weights, configuration and model card, on this machine or on the Hugging Face Hub."""

from .folder import from_pretrained, push_to_hub, save_pretrained

__all__ = ["from_pretrained", "push_to_hub", "save_pretrained"]
