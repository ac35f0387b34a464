"""`distaff config create`: a config from a model type or another config, changed and fitted to a tokenizer."""

from dataclasses import dataclass
from pathlib import Path

from distaff.core.errors import DistaffError, UsageError
from distaff.models import FAMILIES
from distaff.tasks import _recipe as recipe
from distaff.tasks._flags import ModelFlags, flag
from distaff.tasks._folder import output_folder
from distaff.tasks._overrides import override


@dataclass(kw_only=True)
class ConfigFlags:
    """Flags of `distaff config create`."""

    output_dir: str = flag("", "Folder to write config.json into.", required=True)
    model_type: str | None = flag(None, "Model type whose defaults to start from (bert, roberta, ...).")
    config_name: str | None = flag(None, "Config to start from instead: a folder or a Hub id.")
    tokenizer_name: str | None = flag(None, "Take vocabulary and special ids from this tokenizer.")
    config_overrides: str | None = flag(None, "Changes: hidden_size=192,num_hidden_layers=4.")
    overwrite_output_dir: bool = flag(False, "Replace a config in the folder.")


def create(flags: ConfigFlags) -> int:
    """Write the config and say where; the family must accept it."""
    import importlib

    from transformers import CONFIG_MAPPING

    if bool(flags.model_type) == bool(flags.config_name):
        raise UsageError("Start from one of --model_type and --config_name.")
    path = Path(flags.output_dir) / "config.json"
    if flags.output_dir and path.exists() and not flags.overwrite_output_dir:
        raise UsageError(f"'{path}' is there already: choose another --output_dir, or --overwrite_output_dir.")
    source = ModelFlags(config_name=flags.config_name, model_type=flags.model_type, tokenizer_name=flags.tokenizer_name)
    if flags.model_type:
        recipe.check_model_type(flags.model_type)
    config = CONFIG_MAPPING[flags.model_type]() if flags.model_type else recipe.load_config(source, None)
    tokenizer = recipe.load_tokenizer(source) if flags.tokenizer_name else None
    if tokenizer is not None:
        recipe.fit_config_to_tokenizer(config, tokenizer)
    if flags.config_overrides:
        override(config, flags.config_overrides)
    if tokenizer is not None:
        recipe.check_vocabulary(tokenizer, config)
    family = FAMILIES.get(config.model_type)
    if family is not None:
        module = importlib.import_module(f"distaff.models.{family.file}")
        getattr(module, family.classes()["Model"]).check_config(config)
    folder = output_folder(flags.output_dir)
    try:
        config.save_pretrained(folder)
    except OSError as error:
        raise DistaffError(f"--output_dir '{folder}' cannot be written: {error.strerror}.") from error
    print(f"{path}: a {config.model_type} config with a vocabulary of {config.vocab_size}.")
    return 0
