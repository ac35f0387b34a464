"""The options of `generate`: their defaults, where they come from, and what is refused."""

import difflib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from distaff.core.errors import CheckpointError, UsageError, listed

logger = logging.getLogger(__name__)

FILE = "generation_config.json"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `generate` does; names, meanings and defaults are those of Transformers' `GenerationConfig`.

    Lengths are in tokens: `max_length` and `min_length` count the prompt (of encoder-decoders, that of the decoder),
    `max_new_tokens` and `min_new_tokens` do not, and win. `top_k` 0 and `no_repeat_ngram_size` 0 mean none.
    """

    max_length: int | None = None
    max_new_tokens: int | None = None
    min_length: int = 0
    min_new_tokens: int | None = None
    do_sample: bool = False
    num_beams: int = 1
    num_return_sequences: int = 1
    early_stopping: bool | Literal["never"] = False
    length_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float | None = None
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    bad_words_ids: list[list[int]] | None = None
    suppress_tokens: list[int] | None = None
    begin_suppress_tokens: list[int] | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | list[int] | None = None
    exponential_decay_length_penalty: tuple[int, float] | None = None
    remove_invalid_values: bool = False
    renormalize_logits: bool = False
    stop_strings: str | list[str] | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    decoder_start_token_id: int | None = None
    output_scores: bool = False

    @property
    def eos_ids(self) -> list[int]:
        """The tokens that end a sequence."""
        return as_list(self.eos_token_id)

    @property
    def stops(self) -> list[str]:
        """The strings that end a text."""
        given = self.stop_strings or []
        return [given] if isinstance(given, str) else list(given)

    @property
    def filling(self) -> int | None:
        """The token that fills rows up: `pad_token_id`, or the first of the ending tokens."""
        return self.pad_token_id if self.pad_token_id is not None else next(iter(self.eos_ids), None)


NAMES = tuple(field.name for field in fields(Options))
DEFAULTS = Options()
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")

# How results are wrapped, remembered or compiled in PyTorch: no token depends on it.
WITHOUT_EFFECT = frozenset(
    "use_cache cache_implementation cache_config max_cache_len return_dict_in_generate disable_compile compile_config "
    "prefill_chunk_size low_memory transformers_version _from_model_config _commit_hash _original_object_hash "
    "is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
    "assistant_lookbehind target_lookbehind assistant_ensemble_weight speculation_type assistant_early_exit "
    "max_matching_ngram_size continuous_batching_config".split()
)
# Not implemented: refused unless the value means "off".
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "penalty_alpha": (0.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "guidance_scale": (1.0,),
    "token_healing": (False,),
    "use_mtp": (False,),
    **dict.fromkeys(
        "max_time top_h sequence_bias watermarking_config constraints force_words_ids dola_layers "
        "prompt_lookup_num_tokens assistant_model prefix_allowed_tokens_fn stopping_criteria negative_prompt_ids "
        "inputs_embeds".split(),
        (),
    ),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_logits"), (False,)),
}
# Options that change something only together with another.
ONLY_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
ONLY_BEAMS = ("early_stopping", "length_penalty")


def as_list(ids: int | list[int] | None) -> list[int]:
    """Return an option that is one id, several or None as a list."""
    return [] if ids is None else [int(ids)] if not hasattr(ids, "__iter__") else [int(one) for one in ids]


def read_file(folder: Path) -> dict[str, Any]:
    """Return the options in the `generation_config.json` of `folder`, none where there is no such file."""
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"'{path}' is not valid JSON ({error}): repair or remove it.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"'{path}' must hold an object of options: repair or remove it.")
    return _known(values, str(path))


def from_config(config: Any) -> dict[str, Any]:
    """Return the options that an old model config holds."""
    values = config.to_dict()
    return _known({name: value for name, value in values.items() if name in NAMES or name in GENERATION_ONLY}, "config")


# Of the unsupported ones, those that configs of models hold and that concern generation alone.
GENERATION_ONLY = ("num_beam_groups", "diversity_penalty", "encoder_no_repeat_ngram_size")


def resolve_options(
    config: Any, file: Mapping[str, Any] | None, given: Any, explicit: Mapping[str, Any], *, start: int | None = None
) -> Options:
    """Return the options in force: `explicit` arguments over the `given` config over the file's over the config's.

    A model config's options count where there is no file, its special tokens always. `start` is the model's own
    `decoder_start_token_id`. Raises `UsageError` for what is unknown, not supported, out of range or without effect.
    """
    inherited = from_config(config)
    layers: dict[str, Any] = inherited if file is None else {name: inherited.get(name) for name in TOKENS}
    if layers.get("decoder_start_token_id") is None:
        layers["decoder_start_token_id"] = start
    given = given.to_dict() if hasattr(given, "to_dict") else given or {}
    for values in (file or {}, _known(given, "generation_config"), _known(explicit, "generate", strict=True)):
        layers |= {name: value for name, value in values.items() if value is not None}
    for name in explicit:
        if explicit[name] is None and name in NAMES:  # said to be none, whatever the files say
            layers[name] = getattr(DEFAULTS, name)
    options = replace(DEFAULTS, **{name: value for name, value in layers.items() if value is not None})
    _check(options)
    _check_effect(options, explicit)
    return options


def _known(values: Mapping[str, Any], where: str, *, strict: bool = False) -> dict[str, Any]:
    """Return the supported ones of `values`. Raises for those that are not; unknown ones too if `strict`."""
    refused = [
        f"{name}={value!r}"
        for name, value in values.items()
        if name in UNSUPPORTED and value is not None and value not in UNSUPPORTED[name]
    ]
    if refused:
        raise UsageError(f"{where}: {listed(refused)} is not supported by generate: leave it out.")
    unknown = [name for name in values if name not in NAMES and name not in WITHOUT_EFFECT and name not in UNSUPPORTED]
    if unknown and strict:
        near = difflib.get_close_matches(unknown[0], NAMES, 1)
        hint = f"did you mean '{near[0]}'?" if near else "see distaff.generation.options.Options for what it has."
        raise UsageError(f"generate has no option '{unknown[0]}': {hint}")
    if unknown:
        logger.warning("%s: nothing here reads %s; generation goes on without.", where, listed(unknown))
    return {name: value for name, value in values.items() if name in NAMES}


def _check(options: Options) -> None:
    """Raise `UsageError` for a value out of range."""
    limits: dict[str, tuple[bool, str]] = {
        "max_new_tokens": (options.max_new_tokens is None or options.max_new_tokens >= 1, "at least 1"),
        "num_beams": (options.num_beams >= 1, "at least 1"),
        "num_return_sequences": (options.num_return_sequences >= 1, "at least 1"),
        "early_stopping": (options.early_stopping in (True, False, "never"), 'true, false or "never"'),
        "temperature": (not options.do_sample or options.temperature > 0, "above 0; do_sample=False is greedy"),
        "top_k": (options.top_k >= 0, "at least 0"),
        "top_p": (0 <= options.top_p <= 1, "between 0 and 1"),
        "min_p": (options.min_p is None or 0 <= options.min_p <= 1, "between 0 and 1"),
        "typical_p": (0 < options.typical_p <= 1, "above 0 and at most 1"),
        "epsilon_cutoff": (0 <= options.epsilon_cutoff < 1, "between 0 and 1"),
        "eta_cutoff": (0 <= options.eta_cutoff < 1, "between 0 and 1"),
        "repetition_penalty": (options.repetition_penalty > 0, "above 0"),
        "no_repeat_ngram_size": (options.no_repeat_ngram_size >= 0, "at least 0"),
        "bad_words_ids": (all(options.bad_words_ids or [[0]]), "a list of non-empty lists of ids"),
    }
    for name, (fine, wanted) in limits.items():
        if not fine:
            raise UsageError(f"{name} is {getattr(options, name)!r} and must be {wanted}.")
    beams, several = options.num_beams, options.num_return_sequences
    if beams > 1 and several > beams:
        raise UsageError(
            f"num_return_sequences is {several} and num_beams {beams}: beam search returns at most as many sequences "
            "as it has beams."
        )
    if beams == 1 and several > 1 and not options.do_sample:
        raise UsageError(
            f"num_return_sequences is {several}, and greedy search finds one: set do_sample=True or num_beams."
        )


def _check_effect(options: Options, explicit: Mapping[str, Any]) -> None:
    """Raise `UsageError` for an explicit argument that would change nothing."""
    idle = [] if options.do_sample else [(name, "do_sample=True") for name in ONLY_SAMPLING]
    idle += [] if options.num_beams > 1 else [(name, "num_beams above 1") for name in ONLY_BEAMS]
    for name, needed in idle:
        if explicit.get(name) is not None and explicit[name] != getattr(DEFAULTS, name):
            raise UsageError(f"{name}={explicit[name]!r} changes something only with {needed}.")
