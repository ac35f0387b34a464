"""`--config_overrides`: fields of a config changed by `name=value,...`, and what its class derives from them."""

import re
from typing import Any

import yaml

from distaff.core.errors import UsageError

# A comma that begins a new `name=`; those inside of lists do not.
_NEXT = re.compile(r",(?=\s*\w+\s*=)")
_WORDS = {"true": True, "yes": True, "y": True, "1": True, "false": False, "no": False, "n": False, "0": False}


def override(config, text: str) -> None:
    """Change `config` by `name=value,...`; each value is read as the type that the field has.

    A field that holds nothing or a list takes what YAML makes of the value. What the class computes from the changed
    fields when it is built (T5's `is_gated_act`, GPT-Neo's `attention_layers`) follows them.
    """
    try:
        changes = dict(_change(config, part) for part in _NEXT.split(text))
        old = {name: getattr(config, name) for name in changes}
        for name, value in changes.items():
            setattr(config, name, value)
    except Exception as error:  # each config class raises its own
        reason = " ".join(str(error).split()).rstrip(".")
        raise UsageError(f"--config_overrides '{text}' does not fit the config: {reason}.") from error
    for name, (before, after) in _derived(type(config), old, changes).items():
        # One that was set on its own stays.
        if name not in changes and getattr(config, name, None) == before:
            setattr(config, name, after)


def _change(config, part: str) -> tuple[str, Any]:
    name, equals, text = (word.strip() for word in part.partition("="))
    name = config.attribute_map.get(name, name)
    if not equals or not hasattr(config, name):
        raise ValueError(f"'{name}' is no field of it" if equals else f"'{part}' is not name=value")
    old = getattr(config, name)
    if isinstance(old, bool):
        if text.lower() not in _WORDS:
            raise ValueError(f"{name} is true or false, not {text}")
        return name, _WORDS[text.lower()]
    if not isinstance(old, int | float | str):
        return name, yaml.safe_load(text)
    try:
        return name, type(old)(text)
    except ValueError:
        raise ValueError(f"{name} is a {'whole ' * isinstance(old, int)}number, not {text}") from None


def _derived(config_class: Any, old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what a config that is built with `new` has otherwise than one with `old`: both values by name."""
    try:
        before, after = config_class(**old).to_dict(), config_class(**new).to_dict()
    except Exception:
        # These fields need others to be valid: the family's own check says what is wrong with the whole.
        return {}
    return {name: (before[name], value) for name, value in after.items() if name in before and before[name] != value}
