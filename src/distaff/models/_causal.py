"""What decoder-only families share: the head, the call with a cache, and the cache itself."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from distaff.core.errors import DataError
from distaff.core.tree import Tree
from distaff.models._family import FlaxTextModel, check_ids, default_flag
from distaff.models._generation import Generates
from distaff.models._outputs import FlaxBaseModelOutputWithPast, FlaxCausalLMOutputWithPast
from distaff.nn.cache import Cache, advance, empty_cache
from distaff.nn.heads import Decoder
from distaff.nn.layer import LayerInputs
from distaff.nn.mask import Sight, padding_mask
from distaff.nn.stack import StackOutputs
from distaff.nn.vocabulary import Projection
from distaff.resizing import vocab_rows
from distaff.weights import Row, Tie, linear, prefixed


def causal_sight(attention_mask: jax.Array | None, cache: Cache | None) -> Sight:
    """Return what tokens behind those in the cache see: those up to their own, without padding.

    `attention_mask` is `[batch, keys]`, or `[batch, queries, keys]` where queries differ.
    """
    return Sight(padding_mask(attention_mask), causal=True, start=None if cache is None else cache.filled)


def next_positions(input_ids: jax.Array, cache: Cache | None) -> jax.Array:
    """Return `[batch, length]`: 0, 1, 2, ..., counted on from the tokens in the cache."""
    positions = lax.broadcasted_iota(jnp.int32, input_ids.shape, 1)
    return positions if cache is None else positions + cache.filled


def run_layers(
    stack: Callable[..., StackOutputs],
    hidden: jax.Array,
    sight: Sight,
    cache: Cache | None,
    *,
    finish: Callable[[jax.Array], jax.Array],
    **options: Any,
) -> FlaxBaseModelOutputWithPast:
    """Run embeddings `[batch, length, embed]` through `stack` behind the tokens in the cache.

    finish: makes the last state of that of the last layer.
    """
    start, layers = (None, None) if cache is None else (cache.filled, cache.layers)
    outputs = stack(hidden, LayerInputs(sight, start=start), layers, **options)
    last, states = finish(outputs.last), outputs.hidden_states
    return FlaxBaseModelOutputWithPast(
        last,
        advance(cache, outputs.caches, hidden.shape[1]),
        None if states is None else (*states[:-1], last),
        outputs.attentions,
    )


class ForCausalLM(nn.Module):
    """Vocabulary logits of the next token, tied to the word embeddings or not."""

    config: Any
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    gradient_checkpointing: bool | str = False
    scan_layers: bool = False
    attn_implementation: str = "auto"

    # A family sets these; `table_path` leads from the base's parameters to its word embeddings.
    base_class: ClassVar[Any] = None
    base_name: ClassVar[str] = ""
    table_path: ClassVar[tuple[str, ...]] = ()

    @nn.compact
    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        past_key_values: Cache | None = None,
        *,
        lazy_logits: bool = False,
        **options: Any,
    ) -> FlaxCausalLMOutputWithPast:
        """Return logits `[batch, length, vocab]`; with `lazy_logits`, a `Projection` that computes them."""
        flags = (self.dtype, self.param_dtype, self.gradient_checkpointing, self.scan_layers, self.attn_implementation)
        base = self.base_class(self.config, *flags, name=self.base_name)
        outputs = base(input_ids, attention_mask, position_ids, past_key_values, **options)
        hidden = outputs.last_hidden_state
        if self.config.tie_word_embeddings:
            table = base.variables["params"]
            for part in self.table_path:
                table = table[part]
        else:
            fields = (vocab_rows(self.config), hidden.shape[-1], self.initializer_range, self.param_dtype)
            table = Decoder(*fields, name="lm_head")()
        projection = Projection(hidden, table, vocab=self.config.vocab_size)
        logits = projection if lazy_logits else projection.logits()
        return FlaxCausalLMOutputWithPast(logits, outputs.past_key_values, outputs.hidden_states, outputs.attentions)

    @property
    def initializer_range(self) -> float:
        """Standard deviation of random weights."""
        return getattr(self.config, "initializer_range", 0.02)


class FlaxCausalModel(Generates, FlaxTextModel):
    """A decoder that continues token ids `[batch, length]`, with or without a cache of those before."""

    # PyTorch's name of the word embeddings inside of the base model.
    words_key: ClassVar[str] = "wte.weight"

    @classmethod
    def rows(cls, module) -> list[Row]:
        """Rows of all parameters of `module`: those of the base, and under its prefix with those of the head."""
        base = cls.base_rows(module.config)
        return base if cls._is_base() else prefixed(cls.base_model_prefix, base) + cls.head_rows(module.config)

    @classmethod
    def head_rows(cls, config) -> list[Row]:
        """Rows of a head that is not tied."""
        if config.tie_word_embeddings:
            return []
        return linear("lm_head", "lm_head", ("embed", "vocab"), bias=False, required=False)

    @classmethod
    def ties(cls, config) -> tuple[Tie, ...]:
        """The head, where there is one, repeats the word embeddings."""
        return () if cls._is_base() else (Tie("lm_head.weight", f"{cls.base_model_prefix}.{cls.words_key}"),)

    def __call__(  # type: ignore[override]
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        past_key_values: Cache | None = None,
        *,
        params: Tree | None = None,
        dropout_rng: jax.Array | None = None,
        train: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ):
        """Return the outputs for ids and positions `[batch, length]`.

        `past_key_values` is what `init_cache` or an earlier call returned; the mask then has a column for each of its
        slots, and the outputs hold the cache with these tokens added. Without positions, tokens are counted from the
        first of the row or the end of the cache: pass `position_ids` for rows that are padded on the left.

        Raises `DataError` for ids and positions that the model does not have, and for a cache that is full.
        """
        if self.check_inputs:
            self._check(input_ids, attention_mask, position_ids, past_key_values)
        outputs = self.run(
            {
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                "position_ids": position_ids,
                "past_key_values": past_key_values,
            },
            params=params,
            dropout_rng=dropout_rng,
            train=train,
            output_attentions=default_flag(output_attentions, self.config.output_attentions),
            output_hidden_states=default_flag(output_hidden_states, self.config.output_hidden_states),
        )
        return outputs if default_flag(return_dict, self.config.return_dict) else outputs.to_tuple()

    def init_cache(self, batch_size: int, max_length: int) -> Cache:
        """Return an empty cache for `max_length` tokens a row."""
        config = self.config
        return empty_cache(
            num_layers=config.num_hidden_layers,
            batch=batch_size,
            slots=max_length,
            num_heads=config.num_attention_heads,
            head_dim=config.hidden_size // config.num_attention_heads,
            dtype=self.dtype,
        )

    def _check(self, input_ids, attention_mask, position_ids, cache: Cache | None) -> None:
        shape = np.shape(input_ids)
        self.check_shapes(input_ids, None, None, position_ids)
        check_ids("input_ids", input_ids, self.config.vocab_size, "vocab_size")
        filled = 0 if cache is None else cache.filled
        columns = shape[1] if cache is None else cache.slots
        shapes = (shape[0], columns), (shape[0], shape[1], columns)
        if attention_mask is not None and np.shape(attention_mask) not in shapes:
            raise DataError(
                f"attention_mask is {list(np.shape(attention_mask))} and must be {[shape[0], columns]}: "
                f"one column for each {'token' if cache is None else 'slot of the cache'}."
            )
        if isinstance(filled, jax.core.Tracer):
            return
        end = int(filled) + shape[1]
        if cache is not None and end > cache.slots:
            raise DataError(
                f"{shape[1]} more tokens do not fit the cache, which holds {int(filled)} of {cache.slots}: make a "
                "longer one with init_cache."
            )
        if position_ids is not None:
            check_ids("position_ids", position_ids, self.longest_input, "the number of positions")
        elif end > self.longest_input:
            raise DataError(
                f"Rows of {end} tokens are longer than the {self.longest_input} positions of the model: "
                "truncate them in the tokenizer."
            )
