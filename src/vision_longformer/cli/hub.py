"""``vil hub save`` and ``vil hub push``."""

from __future__ import annotations

from .output import print_line


def hub_save(checkpoint: str, folder: str, *, license: str | None = None) -> None:
    """Make a folder with weights, configuration (also for timm) and model card of a classifier or detector.

    For the best or last checkpoint of a run directory, the card also has its recipe and results.

    Args:
        checkpoint: a run directory, for its best model, or a .safetensors file from 'vil train', 'vil detect train' or
            'vil convert'.
        folder: the folder to make; other commands accept it in place of a checkpoint.
        license: license of the weights by its name on the hub, such as mit; not stated by default.
    """
    from ..hub import save_pretrained

    print_line(f"wrote {save_pretrained(checkpoint, folder, license=license)}: read its README.md")


def hub_push(folder: str, repo_id: str, *, private: bool = False, overwrite: bool = False) -> None:
    """Upload a folder from 'vil hub save' to the Hugging Face Hub.

    Args:
        folder: the folder.
        repo_id: OWNER/NAME on the hub; 'vil predict hf-hub:OWNER/NAME IMAGE' then works anywhere.
        private: visible only to you and those you invite.
        overwrite: upload a new version of a model that is there already.
    """
    from ..hub import push_to_hub

    print_line(f"uploaded to {push_to_hub(folder, repo_id, private=private, overwrite=overwrite)}")
