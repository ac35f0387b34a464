"""The public call of encoder-decoders: both halves at once, or one by one with a cache; and their checks."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from distaff.core.errors import ConfigError, DataError, UsageError
from distaff.core.tree import Tree
from distaff.models._family import check_ids, default_flag
from distaff.models._generation import Generates
from distaff.models._outputs import ModelOutput
from distaff.nn.cache import Cache, empty_cache


def shift_tokens_right(labels, pad_token_id: int, decoder_start_token_id: int | None = None):
    """Return decoder inputs `[batch, length]` for `labels`: the start token, then the labels without the last.

    Labels of -100 become padding. Without a start token each row starts with its own last token that is no padding,
    which in mBART's labels is the language.
    """
    xp: Any = jnp if isinstance(labels, jax.Array) else np
    labels = xp.asarray(labels)
    labels = xp.where(labels == -100, pad_token_id, labels)
    if decoder_start_token_id is None:
        last = (labels != pad_token_id).sum(axis=1, keepdims=True) - 1
        start = xp.take_along_axis(labels, xp.maximum(last, 0), axis=1)
    else:
        start = xp.full_like(labels[:, :1], decoder_start_token_id)
    return xp.concatenate([start, labels[:, :-1]], axis=1)


class FlaxSeq2SeqModel(Generates):
    """An encoder of token ids `[batch, source length]`, and a decoder that writes `[batch, length]` from its states."""

    #: Look at concrete ids before they reach the device; False saves the copy to the host.
    check_inputs: bool = True
    # Names of arrays that the head takes beside the usual ones.
    further_inputs: ClassVar[tuple[str, ...]] = ()
    #: Without decoder inputs the source is decoded, as in BART's denoising; other families want both.
    decodes_source: ClassVar[bool] = False
    #: Decoder inputs that are made from labels start with each row's own last token, instead of the start token.
    wraps_labels: ClassVar[bool] = False

    def dummy_inputs(self, input_shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """Return inputs of `input_shape` for both halves."""
        ids = jnp.ones(input_shape, jnp.int32)
        return {"input_ids": ids, "decoder_input_ids": ids}

    # What the families say.

    @property
    def decoder_start_token_id(self) -> int | None:
        """The token that the decoder starts from; None where it differs from row to row, as languages do."""
        return getattr(self.config, "decoder_start_token_id", None)

    @property
    def longest_input(self) -> int | None:
        """The greatest length of a row, in tokens; None where there is none."""
        return self.config.max_position_embeddings

    @classmethod
    def decoder_shape(cls, config) -> tuple[int, int, int]:
        """Return layers, heads and the width of a head of the decoder."""
        return (
            config.decoder_layers,
            config.decoder_attention_heads,
            config.d_model // config.decoder_attention_heads,
        )

    # Calling.

    def __call__(  # type: ignore[override]
        self,
        input_ids,
        attention_mask=None,
        decoder_input_ids=None,
        decoder_attention_mask=None,
        position_ids=None,
        decoder_position_ids=None,
        *,
        params: Tree | None = None,
        dropout_rng: jax.Array | None = None,
        train: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ):
        """Return the outputs for ids of the source `[batch, source length]` and of the decoder `[batch, length]`.

        BART and mBART without `decoder_input_ids` decode the source shifted to the right. Masks have the shapes of
        their ids and are non-zero where a token may be attended. `output_*` and `return_dict` default to the config's.

        Raises `DataError` for ids, positions and lengths that the model does not have.
        """
        if decoder_input_ids is None and self.decodes_source:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(input_ids)
        if decoder_input_ids is None:
            raise UsageError(
                "The decoder has no tokens: pass decoder_input_ids, which "
                f"{type(self).__name__}.prepare_decoder_input_ids_from_labels makes from labels."
            )
        if self.check_inputs:
            self._check(input_ids, attention_mask, position_ids)
            self._check(decoder_input_ids, decoder_attention_mask, decoder_position_ids, "decoder_")
            self._check_rows(decoder_input_ids, "input_ids", np.shape(input_ids)[0])
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": decoder_attention_mask,
            "position_ids": position_ids,
            "decoder_position_ids": decoder_position_ids,
        }
        return self._outputs(
            inputs, params, dropout_rng, train, output_attentions, output_hidden_states, return_dict, "__call__"
        )

    def encode(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        *,
        params: Tree | None = None,
        dropout_rng: jax.Array | None = None,
        train: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ):
        """Return the encoder's states `[batch, source length, embed]`; inputs as those of a whole call."""
        if self.check_inputs:
            self._check(input_ids, attention_mask, position_ids)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        return self._outputs(
            inputs, params, dropout_rng, train, output_attentions, output_hidden_states, return_dict, "encode"
        )

    def decode(
        self,
        decoder_input_ids,
        encoder_outputs=None,
        encoder_attention_mask=None,
        decoder_attention_mask=None,
        decoder_position_ids=None,
        past_key_values: Cache | None = None,
        *,
        params: Tree | None = None,
        dropout_rng: jax.Array | None = None,
        train: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ):
        """Return the decoder's outputs for `decoder_input_ids` `[batch, length]` on the outputs of `encode`.

        `past_key_values` is what `init_cache` or an earlier call returned; `decoder_attention_mask` then has a column
        for each of its slots, and the outputs hold the cache with these tokens added. A cache that an earlier call
        returned knows the encoder's states: `encoder_outputs` may be left out.
        """
        states = None if encoder_outputs is None else encoder_outputs[0]
        if self.check_inputs:
            self._check(decoder_input_ids, decoder_attention_mask, decoder_position_ids, "decoder_", past_key_values)
            self._check_source(decoder_input_ids, states, encoder_attention_mask)
        inputs = {
            "decoder_input_ids": decoder_input_ids,
            "encoder_hidden_states": states,
            "encoder_attention_mask": encoder_attention_mask,
            "decoder_attention_mask": decoder_attention_mask,
            "decoder_position_ids": decoder_position_ids,
            "past_key_values": past_key_values,
        }
        return self._outputs(
            inputs, params, dropout_rng, train, output_attentions, output_hidden_states, return_dict, "decode"
        )

    def init_cache(self, batch_size: int, max_length: int, encoder_outputs=None) -> Cache:
        """Return an empty cache for `max_length` tokens a row of the decoder.

        `encoder_outputs` are those that will be decoded; their keys and values enter it with the first call.
        """
        if encoder_outputs is not None and encoder_outputs[0].shape[0] != batch_size:
            raise UsageError(
                f"A cache of {batch_size} rows does not fit the encoder's outputs, which have "
                f"{encoder_outputs[0].shape[0]}: repeat them for each row, or make the cache for as many."
            )
        layers, heads, head_dim = self.decoder_shape(self.config)
        return empty_cache(
            num_layers=layers,
            batch=batch_size,
            slots=max_length,
            num_heads=heads,
            head_dim=head_dim,
            dtype=self.dtype,
        )

    def prepare_decoder_input_ids_from_labels(self, labels):
        """Return decoder inputs `[batch, length]`: `labels` shifted to the right behind the start token.

        In mBART each row starts with its own last token that is no padding, its language.
        """
        pad = self.config.pad_token_id
        if pad is None:
            raise ConfigError(f"{type(self.config).__name__} has no pad_token_id, which stands for labels of -100.")
        return shift_tokens_right(labels, pad, None if self.wraps_labels else self.decoder_start_token_id)

    # Inside.

    def _outputs(self, inputs, params, dropout_rng, train, attentions, states, return_dict, method: str) -> Any:
        outputs: ModelOutput = self.run(
            inputs,
            params=params,
            dropout_rng=dropout_rng,
            train=train,
            output_attentions=default_flag(attentions, self.config.output_attentions),
            output_hidden_states=default_flag(states, self.config.output_hidden_states),
            method=method,
        )
        return outputs if default_flag(return_dict, self.config.return_dict) else outputs.to_tuple()

    def _check(self, ids, mask, positions, side: str = "", cache: Cache | None = None) -> None:
        """Raise `DataError` for ids, mask and positions that this half does not take."""
        shape = np.shape(ids)
        if len(shape) != 2:
            raise DataError(
                f"{side}input_ids is {list(shape)} and must be [batch, length]: add the missing axes, as in ids[None]."
            )
        if shape[1] == 0:
            raise DataError(f"{side}input_ids is {list(shape)}, rows without a token: there is nothing to compute.")
        check_ids(f"{side}input_ids", ids, self.config.vocab_size, "vocab_size")
        columns = shape[1] if cache is None else cache.slots
        if mask is not None and np.shape(mask) not in ((shape[0], columns), (shape[0], shape[1], columns)):
            raise DataError(
                f"{side}attention_mask is {list(np.shape(mask))} and must be {[shape[0], columns]}: one column for "
                f"each {'token' if cache is None else 'slot of the cache'}."
            )
        self._check_positions(shape, positions, side)
        filled = 0 if cache is None else cache.filled
        if isinstance(filled, jax.core.Tracer):
            return
        end = int(filled) + shape[1]
        if cache is not None and end > cache.slots:
            raise DataError(
                f"{shape[1]} more tokens do not fit the cache, which holds {int(filled)} of {cache.slots}: make a "
                "longer one with init_cache."
            )
        if positions is None and self.longest_input is not None and end > self.longest_input:
            raise DataError(
                f"Rows of {end} tokens in {side}input_ids are longer than the {self.longest_input} positions of the "
                "model: truncate them in the tokenizer."
            )

    def _check_positions(self, shape, positions, side: str) -> None:
        if positions is None:
            return
        if self.longest_input is None:
            raise UsageError(
                f"{type(self).__name__} knows distances between tokens and no positions: leave {side}position_ids out."
            )
        if np.shape(positions) != shape:
            raise DataError(
                f"{side}position_ids is {list(np.shape(positions))} and {side}input_ids {list(shape)}: give both the "
                "same shape."
            )
        check_ids(f"{side}position_ids", positions, self.longest_input, "max_position_embeddings")

    def _check_rows(self, decoder_input_ids, other: str, rows: int) -> None:
        if np.shape(decoder_input_ids)[0] != rows:
            raise DataError(
                f"decoder_input_ids has {np.shape(decoder_input_ids)[0]} rows and {other} {rows}: give both one row "
                "for each example."
            )

    def _check_source(self, decoder_input_ids, states, mask) -> None:
        if states is None:
            return
        shape = np.shape(states)
        if len(shape) != 3:
            raise DataError(
                f"The encoder's states are {list(shape)} and must be [batch, source length, embed]: pass what encode "
                "returns, not its states alone."
            )
        self._check_rows(decoder_input_ids, "encoder_outputs", shape[0])
        if mask is not None and np.shape(mask) != shape[:2]:
            raise DataError(
                f"encoder_attention_mask is {list(np.shape(mask))} and must be {list(shape[:2])}: one column for each "
                "token of the source."
            )
