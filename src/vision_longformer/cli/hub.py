"""``vil hub``."""

from __future__ import annotations

from .output import print_line


def hub_save(checkpoint: str, folder: str, *, license: str | None = None) -> None:
    """Make a folder with weights, configuration (also for timm) and model card of a classifier or detector.

    The best or last checkpoint of a run directory brings its recipe and results into the card.

    Args:
        checkpoint: a .safetensors file that 'vil train', 'vil detect train' or 'vil convert' wrote.
        folder: the new folder; commands that take a checkpoint take it, too.
        license: of the weights, as the hub names it, such as mit; not stated by default.
    """
    from ..hub import save_pretrained

    print_line(f"wrote {save_pretrained(checkpoint, folder, license=license)}: read its README.md")


def hub_push(folder: str, repo_id: str, *, private: bool = False, overwrite: bool = False) -> None:
    """Upload a folder that 'vil hub save' made to the Hugging Face Hub.

    Args:
        folder: the folder.
        repo_id: OWNER/NAME on the hub; 'vil predict hf-hub:OWNER/NAME IMAGE' then works anywhere.
        private: only for you and those whom you invite.
        overwrite: a new version of a model that is there already.
    """
    from ..hub import push_to_hub

    print_line(f"uploaded to {push_to_hub(folder, repo_id, private=private, overwrite=overwrite)}")
