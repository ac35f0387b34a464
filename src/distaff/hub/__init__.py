"""Checkpoints on disk and on the Hub: find, download, open, save, publish."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distaff.hub.card import write_card
    from distaff.hub.files import Checkpoint, open_checkpoint, parse_size, save_msgpack, save_safetensors
    from distaff.hub.image_processor import new_image_processor, open_image_processor
    from distaff.hub.repo import push_folder, resolve
    from distaff.hub.tokenizer import open_tokenizer

_HOMES = {
    "Checkpoint": "files",
    "new_image_processor": "image_processor",
    "open_checkpoint": "files",
    "open_image_processor": "image_processor",
    "open_tokenizer": "tokenizer",
    "parse_size": "files",
    "push_folder": "repo",
    "resolve": "repo",
    "save_msgpack": "files",
    "save_safetensors": "files",
    "write_card": "card",
}

__all__ = [
    "Checkpoint",
    "new_image_processor",
    "open_checkpoint",
    "open_image_processor",
    "open_tokenizer",
    "parse_size",
    "push_folder",
    "resolve",
    "save_msgpack",
    "save_safetensors",
    "write_card",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'distaff.hub' has no attribute '{name}'")
    return getattr(import_module(f"distaff.hub.{_HOMES[name]}"), name)
