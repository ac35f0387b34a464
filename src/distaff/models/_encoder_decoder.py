"""Modules that encoder-decoder families share: the base, what a stack is given, and the language modeling head."""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from distaff.core.errors import UsageError
from distaff.models._causal import causal_sight
from distaff.models._outputs import (
    FlaxBaseModelOutput,
    FlaxBaseModelOutputWithPastAndCrossAttentions,
    FlaxCausalLMOutputWithCrossAttentions,
    FlaxSeq2SeqLMOutput,
    FlaxSeq2SeqModelOutput,
)
from distaff.nn.cache import Cache, advance
from distaff.nn.embed import embedding as embedding_table
from distaff.nn.heads import Decoder
from distaff.nn.mask import Sight, padding_mask
from distaff.nn.vocabulary import Projection
from distaff.resizing import vocab_rows


class StackInputs(NamedTuple):
    """What the encoder or the decoder is given beside its embeddings.

    sight: what self-attention sees. position_ids: `[batch, length]`, None for those that follow the tokens in the
    cache. source: the encoder's states `[batch, source length, embed]`, and source_sight what is seen of them. cache:
    of the tokens before.
    """

    sight: Sight = Sight()
    position_ids: jax.Array | None = None
    source: jax.Array | None = None
    source_sight: Sight | None = None
    cache: Cache | None = None


class EncoderDecoder(nn.Module):
    """Shared word embeddings, an encoder, and a decoder that attends to the encoder's states (Vaswani et al. 2017)."""

    config: Any
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    gradient_checkpointing: bool | str = False
    scan_layers: bool = False
    attn_implementation: str = "auto"

    # A family sets it: called as (config, is_decoder, dtype, param_dtype, gradient_checkpointing, scan_layers,
    # attn_implementation), it makes a module that maps (embeddings, StackInputs) to `StackOutputs`.
    stack_class: ClassVar[Any] = None
    has_decoder: ClassVar[bool] = True

    def setup(self):
        """Make the parts."""
        config, dtypes = self.config, (self.dtype, self.param_dtype)
        flags = (self.gradient_checkpointing, self.scan_layers, self.attn_implementation)
        self.shared = embedding_table(
            vocab_rows(config),
            config.d_model,
            initializer_range=self.embedding_range(),
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            entries="vocab",
        )
        self.encoder = self.stack_class(config, False, *dtypes, *flags)
        if self.has_decoder:
            self.decoder = self.stack_class(config, True, *dtypes, *flags)

    def embedding_range(self) -> float:
        """Return the standard deviation of random word embeddings."""
        return self.config.init_std

    def embed(self, input_ids: jax.Array) -> jax.Array:
        """Return `[batch, length, embed]`, what a stack starts from."""
        return self.shared(input_ids)

    def encode(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        *,
        deterministic: bool = True,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> FlaxBaseModelOutput:
        """Read `input_ids` `[batch, length]`; `attention_mask` is `[batch, length]` or `[batch, length, length]`."""
        outputs = self.encoder(
            self.embed(input_ids),
            StackInputs(Sight(padding_mask(attention_mask)), position_ids),
            deterministic=deterministic,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        return FlaxBaseModelOutput(outputs.last, outputs.hidden_states, outputs.attentions)

    def decode(
        self,
        decoder_input_ids: jax.Array,
        encoder_hidden_states: jax.Array | None = None,
        encoder_attention_mask: jax.Array | None = None,
        decoder_attention_mask: jax.Array | None = None,
        decoder_position_ids: jax.Array | None = None,
        past_key_values: Cache | None = None,
        *,
        deterministic: bool = True,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> FlaxBaseModelOutputWithPastAndCrossAttentions:
        """Read `decoder_input_ids` `[batch, length]` behind those in the cache.

        `encoder_hidden_states` is `[batch, source length, embed]`, and None where the cache holds their keys and
        values. `encoder_attention_mask` is `[batch, source length]`, `decoder_attention_mask` `[batch, keys]`.
        """
        cache = past_key_values
        if encoder_hidden_states is None and (cache is None or cache.layers[0].source is None):
            raise UsageError("The decoder has nothing to attend to: pass the encoder's states, or a cache of them.")
        outputs = self.decoder(
            self.embed(decoder_input_ids),
            StackInputs(
                causal_sight(decoder_attention_mask, cache),
                decoder_position_ids,
                encoder_hidden_states,
                Sight(padding_mask(encoder_attention_mask)),
                cache,
            ),
            deterministic=deterministic,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        return FlaxBaseModelOutputWithPastAndCrossAttentions(
            outputs.last,
            advance(cache, outputs.caches, decoder_input_ids.shape[1]),
            outputs.hidden_states,
            outputs.attentions,
            outputs.source_attentions,
        )

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        decoder_input_ids: jax.Array | None = None,
        decoder_attention_mask: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        decoder_position_ids: jax.Array | None = None,
        **options: Any,
    ) -> FlaxSeq2SeqModelOutput:
        """Encode `input_ids` `[batch, source length]`, and decode `decoder_input_ids` `[batch, length]` on them."""
        if decoder_input_ids is None:
            raise UsageError("The decoder has no tokens: pass decoder_input_ids, the labels shifted to the right.")
        encoded = self.encode(input_ids, attention_mask, position_ids, **options)
        decoded = self.decode(
            decoder_input_ids,
            encoded.last_hidden_state,
            attention_mask if attention_mask is None or attention_mask.ndim == 2 else attention_mask.any(axis=1),
            decoder_attention_mask,
            decoder_position_ids,
            **options,
        )
        return FlaxSeq2SeqModelOutput(
            decoded.last_hidden_state,
            decoded.hidden_states,
            decoded.attentions,
            decoded.cross_attentions,
            encoded.last_hidden_state,
            encoded.hidden_states,
            encoded.attentions,
        )


class HeadedEncoderDecoder(nn.Module):
    """A base model under the name "model", or, with `own_scope`, its parameters beside those of the head."""

    config: Any
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    gradient_checkpointing: bool | str = False
    scan_layers: bool = False
    attn_implementation: str = "auto"

    base_class: ClassVar[Any] = None
    own_scope: ClassVar[bool] = False

    def setup(self):
        """Make the base and the head."""
        flags = (self.gradient_checkpointing, self.scan_layers, self.attn_implementation)
        self.model = self.base_class(self.config, self.dtype, self.param_dtype, *flags)
        if self.own_scope:
            nn.share_scope(self, self.model)
        self.setup_head()

    def setup_head(self) -> None:
        """Make what stands on the base."""

    def encode(self, *inputs: Any, **options: Any) -> FlaxBaseModelOutput:
        """Return the encoder's states, as `EncoderDecoder.encode`."""
        return self.model.encode(*inputs, **options)

    def decode(self, *inputs: Any, **options: Any) -> Any:
        """Return the decoder's states, as `EncoderDecoder.decode`."""
        return self.model.decode(*inputs, **options)


class ForConditionalGeneration(HeadedEncoderDecoder):
    """Vocabulary logits of the next token, tied to the word embeddings or not."""

    def setup_head(self) -> None:
        """Make the projection to the vocabulary where it is not tied."""
        config = self.config
        if not config.tie_word_embeddings:
            initializer_range = self.model.embedding_range()
            self.lm_head = Decoder(vocab_rows(config), config.d_model, initializer_range, self.param_dtype)

    def projection(self, hidden: jax.Array) -> Projection:
        """Return the logits to be of `hidden` `[batch, length, embed]`."""
        table = self.model.shared.embedding if self.config.tie_word_embeddings else self.lm_head()
        return Projection(hidden, table, vocab=self.config.vocab_size)

    def decode(self, *inputs: Any, lazy_logits: bool = False, **options: Any) -> FlaxCausalLMOutputWithCrossAttentions:
        """Return logits `[batch, length, vocab]`, inputs as `EncoderDecoder.decode`.

        With `lazy_logits`, a `Projection` that computes them.
        """
        outputs = self.model.decode(*inputs, **options)
        projection = self.projection(outputs.last_hidden_state)
        return FlaxCausalLMOutputWithCrossAttentions(
            projection if lazy_logits else projection.logits(),
            outputs.past_key_values,
            outputs.hidden_states,
            outputs.attentions,
            outputs.cross_attentions,
        )

    def __call__(self, *inputs: Any, lazy_logits: bool = False, **options: Any) -> FlaxSeq2SeqLMOutput:
        """Return logits `[batch, length, vocab]`, inputs as `EncoderDecoder`; with `lazy_logits`, a `Projection`."""
        outputs = self.model(*inputs, **options)
        projection = self.projection(outputs.last_hidden_state)
        return FlaxSeq2SeqLMOutput(projection if lazy_logits else projection.logits(), **outputs.states())
