"""What the family files share: the check of a config's fields, the call of text encoders, checks of ids on the host."""

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from distaff.core.errors import ConfigError, DataError, UsageError, listed
from distaff.nn.act import ACTIVATIONS
from distaff.pretrained import FlaxPreTrainedModel

logger = logging.getLogger(__name__)

# Fields of every Hugging Face config that do not change what a module computes: names and provenance, how results are
# returned, labels' names (num_labels is read from them), memory strategies, and defaults of generation.
COMMON_WITHOUT_EFFECT = frozenset(
    "transformers_version architectures model_type _name_or_path name_or_path torch_dtype dtype return_dict "
    "use_return_dict output_hidden_states output_attentions id2label label2id problem_type task_specific_params "
    "finetuning_task tokenizer_class prefix bos_token_id eos_token_id sep_token_id decoder_start_token_id "
    "chunk_size_feed_forward gradient_checkpointing use_cache auto_map _attn_implementation_autoset "
    "_attn_implementation attn_implementation _commit_hash use_bfloat16 torchscript tf_legacy_loss "
    # Private: how many rows the tables have (resizing.py).
    "_padded_vocab_size "
    "num_labels _num_labels output_past directionality language custom_pipelines "
    # How to generate: read from a GenerationConfig, never by a module.
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k "
    "top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
    "bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id "
    "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens".split()
)

SIZES = frozenset(
    "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size max_position_embeddings "
    "type_vocab_size n_embd n_head n_layer n_positions d_model d_ff d_kv num_heads num_layers".split()
)
PROBABILITY = re.compile("dropout|_pdrop$|layerdrop")


def check_fields(
    config,
    *,
    consumed: Collection[str],
    allowed: Mapping[str, Collection[Any]],
    without_effect: Iterable[str] = (),
) -> None:
    """Refuse every field whose value is not among the `allowed` ones; warn of fields that nobody here knows.

    Raises `ConfigError` with all of them.
    """
    values = config.to_dict()
    check_values(type(config).__name__, values)
    refused = [
        f"{name}={values[name]!r} (only {' or '.join(map(repr, fine))})"
        for name, fine in allowed.items()
        if name in values and values[name] not in fine
    ]
    if refused:
        raise ConfigError(
            f"{type(config).__name__}: {listed(refused)} is not implemented: use a checkpoint without it, or PyTorch."
        )
    known = {*consumed, *allowed, *without_effect, *COMMON_WITHOUT_EFFECT}
    unknown = sorted(values.keys() - known)
    if unknown:
        logger.warning("%s: nothing here reads %s; the model is built without.", type(config).__name__, listed(unknown))


def check_values(name: str, values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for sizes below 1, probabilities outside [0, 1] and labels that are not counted from 0."""
    wrong = [
        f"{field}={value!r} (at least 1)"
        for field, value in values.items()
        if field in SIZES and isinstance(value, int) and value < 1
    ]
    wrong += [
        f"{field}={value!r} (from 0 to 1)"
        for field, value in values.items()
        if PROBABILITY.search(field) and isinstance(value, int | float) and not 0 <= value <= 1
    ]
    numbers = sorted(values.get("id2label") or {})
    if numbers != list(range(len(numbers))):
        wrong.append(f"id2label of {listed(numbers, 3)} (numbers from 0 on)")
    if wrong:
        raise ConfigError(f"{name}: {listed(wrong)} cannot be: correct the config.")


def check_activation(name: Any, field: str = "hidden_act") -> None:
    """Raise `ConfigError` for an activation, the config's `field`, that `nn.act` does not have."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"{field}={name!r} is not implemented: use one of {', '.join(ACTIVATIONS)}.")


def check_heads(
    hidden_size: int, num_heads: int, fields: tuple[str, str] = ("hidden_size", "num_attention_heads")
) -> None:
    """Raise `ConfigError` unless the heads share the hidden size evenly; `fields` are what the config calls the two."""
    if hidden_size % num_heads:
        raise ConfigError(f"{fields[0]}={hidden_size} does not divide into {fields[1]}={num_heads}.")


def check_ids(name: str, ids: Any, size: int, size_name: str) -> None:
    """Raise `DataError` if an id `[batch, ...]` is not a whole number in [0, size).

    On the host, because on the device an id beyond its table turns into NaN and -1 into the last row.
    """
    if isinstance(ids, jax.core.Tracer):
        return
    array = np.asarray(ids)
    if not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"{name} must be whole numbers, not {array.dtype}: pass the tokenizer's ids, as int32.")
    outside = (array < 0) | (array >= size)
    if outside.any():
        remedy = "does the tokenizer belong to this model?"
        if size_name == "vocab_size":
            remedy = (
                "load the model's own tokenizer, pad with a token that it has "
                "(tokenizer.pad_token = tokenizer.eos_token), or call model.resize_token_embeddings(len(tokenizer))."
            )
        where = tuple(int(index) for index in np.argwhere(outside)[0])
        raise DataError(
            f"{name}{list(where)} is {int(array[where])}, and {size_name} is {size}: "
            f"{int(outside.sum())} such ids; {remedy}"
        )


def check_places(name: str, places: Any, length: int) -> None:
    """Raise `DataError` if `places` are not `[batch, count]` in rows of `length` tokens."""
    if np.ndim(places) != 2:
        raise DataError(
            f"{name} is {list(np.shape(places))} and must be [batch, count]: a list of places for each row."
        )
    check_ids(name, places, length, "the length of the rows")


class FlaxTextModel(FlaxPreTrainedModel):
    """A model whose main input is token ids `[batch, length]`."""

    #: Look at concrete ids before they reach the device; False saves the copy to the host.
    check_inputs: bool = True
    accepts_masked_positions: ClassVar[bool] = False
    # Names of arrays that the head takes beside the usual ones.
    further_inputs: ClassVar[tuple[str, ...]] = ()
    # Whether the mask may be [batch, queries, keys], for packed rows.
    accepts_pairwise_mask: ClassVar[bool] = False
    input_rank: ClassVar[int] = 2

    def __call__(  # type: ignore[override]
        self,
        input_ids,
        attention_mask=None,
        token_type_ids=None,
        position_ids=None,
        *,
        masked_positions=None,
        params=None,
        dropout_rng: jax.Array | None = None,
        train: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **further: Any,
    ):
        """Return the head's output for ids, mask, types and positions, each `[batch, length]`.

        The mask is non-zero where a token may be attended, all ones by default; where `accepts_pairwise_mask`, it may
        be `[batch, queries, keys]`. A masked LM takes `masked_positions`
        `[batch, count]` and computes logits there alone. `output_*` and `return_dict` default to the config's.
        `further` are the head's `further_inputs`.

        Raises `DataError` for ids that their tables do not have.
        """
        if self.check_inputs:
            self.check_shapes(input_ids, attention_mask, token_type_ids, position_ids)
            self.check_ids(input_ids, token_type_ids, position_ids)
            for name, places in (("masked_positions", masked_positions), ("first_tokens", further.get("first_tokens"))):
                if places is not None:
                    check_places(name, places, np.shape(input_ids)[-1])
        unknown = sorted(further.keys() - set(self.further_inputs))
        if unknown:
            raise UsageError(f"{type(self).__name__} takes no input '{unknown[0]}': leave it out.")
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            **further,
        }
        if self.accepts_masked_positions:
            inputs["masked_positions"] = masked_positions
        elif masked_positions is not None:
            raise ConfigError(f"{type(self).__name__} has no logits at masked positions: leave masked_positions out.")
        outputs = self.run(
            inputs,
            params=params,
            dropout_rng=dropout_rng,
            train=train,
            output_attentions=default_flag(output_attentions, self.config.output_attentions),
            output_hidden_states=default_flag(output_hidden_states, self.config.output_hidden_states),
        )
        return outputs if default_flag(return_dict, self.config.return_dict) else outputs.to_tuple()

    @property
    def longest_input(self) -> int:
        """The greatest length of a row, in tokens."""
        return self.config.max_position_embeddings

    @property
    def first_position(self) -> int:
        """The position of a text's first token."""
        return 0

    def check_shapes(self, input_ids, *others) -> None:
        """Raise `DataError` unless `input_ids` has a shape that the head takes and the other inputs have the same."""
        shape = np.shape(input_ids)
        if len(shape) != self.input_rank:
            wanted = "[batch, length]" if self.input_rank == 2 else "[batch, choices, length]"
            raise DataError(
                f"input_ids is {list(shape)} and must be {wanted}: add the missing axes, as in input_ids[None]."
            )
        if shape[-1] == 0:
            raise DataError(f"input_ids is {list(shape)}, rows without a token: there is nothing to compute.")
        for name, other in zip(("attention_mask", "token_type_ids", "position_ids"), others, strict=True):
            pairwise = self.accepts_pairwise_mask and name == "attention_mask" and len(shape) == 2
            if other is not None and np.shape(other) not in (shape, (*shape, shape[-1]) if pairwise else shape):
                raise DataError(
                    f"{name} is {list(np.shape(other))} and input_ids {list(shape)}: give both the same shape."
                )

    def check_ids(self, input_ids, token_type_ids=None, position_ids=None) -> None:
        """Raise `DataError` for ids that the model's tables do not have."""
        config = self.config
        check_ids("input_ids", input_ids, config.vocab_size, "vocab_size")
        if token_type_ids is not None:
            check_ids("token_type_ids", token_type_ids, config.type_vocab_size, "type_vocab_size")
        if position_ids is not None:
            check_ids("position_ids", position_ids, config.max_position_embeddings, "max_position_embeddings")


def default_flag(value: bool | None, default: bool) -> bool:
    """Return `value`, or the `default` of the config where it is None."""
    return bool(default if value is None else value)
