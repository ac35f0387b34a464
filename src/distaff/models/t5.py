"""T5 (Raffel et al. 2019, https://arxiv.org/abs/1910.10683) and mT5 (Xue et al. 2020)."""

import math
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from transformers import MT5Config, T5Config

from distaff.core.errors import UsageError
from distaff.models import _encoder_decoder as parts
from distaff.models._encoder_decoder import EncoderDecoder, StackInputs
from distaff.models._family import check_activation, check_fields
from distaff.models._seq2seq import FlaxSeq2SeqModel
from distaff.nn.dropout import Dropout
from distaff.nn.embed import embedding as embedding_table
from distaff.nn.layer import LayerInputs, TransformerLayer
from distaff.nn.norm import RMSNorm
from distaff.nn.stack import Stack, StackOutputs
from distaff.nn.vocabulary import Projection
from distaff.weights import Row, Tie, embedding, linear, prefixed, repeated

# What the config means.

CONSUMED = frozenset(
    "vocab_size d_model d_kv d_ff num_layers num_decoder_layers num_heads relative_attention_num_buckets "
    "relative_attention_max_distance dropout_rate layer_norm_epsilon initializer_factor feed_forward_proj "
    "is_gated_act dense_act_fn scale_decoder_outputs tie_word_embeddings pad_token_id".split()
)
ALLOWED: dict[str, tuple[Any, ...]] = {
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({}, None),
}
# An encoder is saved with is_encoder_decoder=False; positions have no table whose size n_positions could be; the
# heads that classifier_dropout is for are not among ours.
WITHOUT_EFFECT = "is_encoder_decoder n_positions classifier_dropout".split()


# Relative positions.


def bucket_table(num_buckets: int, max_distance: int) -> np.ndarray:
    """Return `[max_distance + 1]`: the bucket of each distance, without its direction (the paper's section 2.1).

    The first half of the buckets holds one distance each, the others grow with the logarithm, and all distances from
    `max_distance` on share the last. Computed in float32 on the host, as in PyTorch: accelerators round logarithms
    otherwise, and a distance between two buckets would change sides.
    """
    exact = num_buckets // 2
    distance = np.arange(max_distance + 1)
    with np.errstate(divide="ignore"):
        logarithm = np.log(distance.astype(np.float32) / np.float32(exact)) / np.float32(math.log(max_distance / exact))
    larger = exact + np.maximum(logarithm, 0) * np.float32(num_buckets - exact)
    return np.where(distance < exact, distance, np.minimum(larger.astype(np.int32), num_buckets - 1)).astype(np.int32)


def relative_buckets(offsets: jax.Array, *, bidirectional: bool, num_buckets: int, max_distance: int) -> jax.Array:
    """Return the bucket of each of `offsets`, key position minus query position.

    Where both directions are attended to, keys behind the query have the upper half of the buckets.
    """
    if bidirectional:
        num_buckets //= 2
    table = jnp.asarray(bucket_table(num_buckets, max_distance))
    distances = jnp.abs(offsets) if bidirectional else jnp.maximum(-offsets, 0)
    buckets = table[jnp.minimum(distances, max_distance)]
    return buckets + num_buckets * (offsets > 0) if bidirectional else buckets


class RelativeBias(nn.Module):
    """A learnt number on the scores for each head and bucket of distances."""

    num_heads: int
    num_buckets: int
    max_distance: int
    bidirectional: bool
    initializer_range: float
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, queries: int, keys: int, start: jax.Array | int) -> jax.Array:
        """Return float32 `[heads, queries + keys]`: what `Sight.relative` is, with its origin at `queries - 1`.

        Queries stand at positions from `start` on and keys from 0 on.
        """
        # One number for each of the offsets that occur, and one more, with which a bias is made by a reshape.
        offsets = jnp.arange(queries + keys) - (queries - 1) - start
        sizes = {"num_buckets": self.num_buckets, "max_distance": self.max_distance}
        buckets = relative_buckets(offsets, bidirectional=self.bidirectional, **sizes)
        table = embedding_table(
            self.num_buckets,
            self.num_heads,
            initializer_range=self.initializer_range,
            dtype=jnp.float32,
            param_dtype=self.param_dtype,
            name="table",
        )
        return table(buckets).T


# The model.


class T5Stack(nn.Module):
    """Pre-norm layers without biases and without scaled scores, whose relative bias all of them share."""

    config: Any
    is_decoder: bool
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    gradient_checkpointing: bool | str = False
    scan_layers: bool = False
    attn_implementation: str = "auto"

    @property
    def initializer_range(self) -> float:
        """Standard deviation of most of a stack's random weights."""
        return self.config.initializer_factor * self.config.d_model**-0.5

    def layer_fields(self) -> dict[str, Any]:
        """Return the fields of a layer."""
        config = self.config
        return {
            "num_heads": config.num_heads,
            "intermediate_size": config.d_ff,
            "activation": config.dense_act_fn,
            "norm_eps": config.layer_norm_epsilon,
            "norm_order": "pre",
            "norm": "rms",
            "dropout_rate": config.dropout_rate,
            "attention_dropout_rate": config.dropout_rate,
            "initializer_range": self.initializer_range,
            "cross_attention": self.is_decoder,
            "attention_fields": {"head_dim": config.d_kv, "scale": 1.0, "use_bias": False, "out_bias": False},
            "mlp_fields": {"use_bias": False, "gated": config.is_gated_act, "dropout_rate": config.dropout_rate},
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
        }

    @nn.compact
    def __call__(
        self,
        embedded: jax.Array,
        inputs: StackInputs,
        *,
        deterministic: bool,
        output_hidden_states: bool,
        output_attentions: bool,
    ) -> StackOutputs:
        """Run word embeddings `[batch, length, embed]` through the layers."""
        config, cache = self.config, inputs.cache
        if inputs.position_ids is not None:
            raise UsageError("T5 knows distances between tokens and no positions: leave position ids out.")
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        dropout = Dropout(config.dropout_rate, deterministic=deterministic)
        relative = RelativeBias(
            config.num_heads,
            config.relative_attention_num_buckets,
            config.relative_attention_max_distance,
            not self.is_decoder,
            self.initializer_range,
            self.param_dtype,
            name="relative_attention_bias",
        )
        length, start = embedded.shape[1], None if cache is None else cache.filled
        values = relative(length, length if cache is None else cache.slots, 0 if start is None else start)
        sight = replace(inputs.sight, relative=values, origin=length - 1)
        outputs = Stack(
            TransformerLayer,
            self.layer_fields(),
            config.num_decoder_layers if self.is_decoder else config.num_layers,
            remat=self.gradient_checkpointing,
            scan=self.scan_layers,
            attn_implementation=self.attn_implementation,
            name="block",
        )(
            dropout(embedded),
            LayerInputs(sight, inputs.source, inputs.source_sight, start),
            None if cache is None else cache.layers,
            deterministic=deterministic,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        last = dropout(RMSNorm(eps=config.layer_norm_epsilon, **dtypes, name="final_layer_norm")(outputs.last))
        states = outputs.hidden_states
        return outputs._replace(last=last, hidden_states=None if states is None else (*states[:-1], last))


class T5Module(EncoderDecoder):
    """The base model."""

    stack_class = T5Stack

    def embedding_range(self) -> float:
        """Return the standard deviation of random word embeddings."""
        return self.config.initializer_factor


class T5EncoderModule(T5Module):
    """The encoder alone."""

    has_decoder = False

    def __call__(self, input_ids: jax.Array, attention_mask: jax.Array | None = None, **options):  # type: ignore[override]
        """Encode `input_ids` `[batch, length]`."""
        return self.encode(input_ids, attention_mask, **options)


class T5ForConditionalGenerationModule(parts.ForConditionalGeneration):
    """`ForConditionalGeneration` on T5."""

    base_class = T5Module
    own_scope = True

    def projection(self, hidden: jax.Array) -> Projection:
        """Return the logits to be of `hidden` `[batch, length, embed]`."""
        # Version 1.1 does not scale, and neither does mT5, whose config lacks the field.
        scaled = getattr(self.config, "scale_decoder_outputs", False)
        return super().projection(hidden * self.config.d_model**-0.5 if scaled else hidden)


# Rows.


def _norm(key: str, path: str, config) -> list[Row]:
    return [Row(f"{key}.weight", f"{path}/scale", "rms_scale", (None,), std=config.initializer_factor)]


def _attention_rows(key: str, path: str, config) -> list[Row]:
    factor, inner = config.initializer_factor, config.num_heads * config.d_kv
    # Scores are not scaled: small queries do that at the start.
    query, other = factor * (config.d_model * config.d_kv) ** -0.5, factor * config.d_model**-0.5
    return [
        *linear(f"{key}.q", f"{path}/query", ("embed", "heads"), bias=False, std=query),
        *linear(f"{key}.k", f"{path}/key", ("embed", "heads"), bias=False, std=other),
        *linear(f"{key}.v", f"{path}/value", ("embed", "heads"), bias=False, std=other),
        *linear(f"{key}.o", f"{path}/out", ("heads", "embed"), bias=False, std=factor * inner**-0.5),
    ]


def _mlp_rows(key: str, path: str, config) -> list[Row]:
    inner, outer = (config.initializer_factor * size**-0.5 for size in (config.d_model, config.d_ff))
    ups = {"wi_0": "gate", "wi_1": "up"} if config.is_gated_act else {"wi": "up"}
    up_axes, down_axes = ("embed", "mlp"), ("mlp", "embed")
    rows = linear(f"{key}.wo", f"{path}/down", down_axes, bias=False, std=outer)
    for name, ours in ups.items():
        rows += linear(f"{key}.{name}", f"{path}/{ours}", up_axes, bias=False, std=inner)
    return rows


def _stack_rows(config, side: str) -> list[Row]:
    decoder = side == "decoder"
    block, last = "block.{i}", 2 if decoder else 1
    rows = [
        *_attention_rows(f"{block}.layer.0.SelfAttention", "block/{i}/attention", config),
        *_norm(f"{block}.layer.0.layer_norm", "block/{i}/attention_norm", config),
        *_mlp_rows(f"{block}.layer.{last}.DenseReluDense", "block/{i}/mlp", config),
        *_norm(f"{block}.layer.{last}.layer_norm", "block/{i}/mlp_norm", config),
    ]
    if decoder:
        rows += _attention_rows(f"{block}.layer.1.EncDecAttention", "block/{i}/cross_attention", config)
        rows += _norm(f"{block}.layer.1.layer_norm", "block/{i}/cross_attention_norm", config)
    shared = embedding(
        "block.0.layer.0.SelfAttention.relative_attention_bias",
        "relative_attention_bias/table",
        (None, "heads"),
        std=config.initializer_factor * config.d_model**-0.5,
    )
    count = config.num_decoder_layers if decoder else config.num_layers
    return prefixed(side, [*shared, *repeated(count, rows), *_norm("final_layer_norm", "final_layer_norm", config)])


def t5_rows(config, sides: tuple[str, ...] = ("encoder", "decoder")) -> list[Row]:
    """Rows of the word embeddings and of those halves."""
    repeats = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    shared = embedding("shared", "shared", ("vocab", "embed"), repeats=repeats, std=config.initializer_factor)
    return [*shared, *(row for side in sides for row in _stack_rows(config, side))]


# Public names.


class FlaxT5PreTrainedModel(FlaxSeq2SeqModel):
    """What the T5 classes share."""

    config_class: ClassVar[Any] = T5Config
    # Old versions of Transformers made a bias of cross-attention that nothing used.
    ignored_keys: ClassVar[tuple[str, ...]] = (
        r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",
    )

    def __init__(self, config, *args: Any, dtype: Any = jnp.float32, **fields: Any):
        if np.dtype(dtype) == np.float16:
            raise UsageError("T5's feed-forward blocks overflow float16: compute in bfloat16 or float32.")
        super().__init__(config, *args, dtype=dtype, **fields)

    @classmethod
    def check_config(cls, config) -> None:
        """Raise `ConfigError` for what is not implemented."""
        check_fields(config, consumed=CONSUMED, allowed=ALLOWED, without_effect=WITHOUT_EFFECT)
        check_activation(config.dense_act_fn)

    @classmethod
    def base_rows(cls, config) -> list[Row]:
        """Rows of the base model."""
        return t5_rows(config)

    @classmethod
    def rows(cls, module) -> list[Row]:
        """Rows of all parameters of `module`."""
        return t5_rows(module.config)

    @classmethod
    def decoder_shape(cls, config) -> tuple[int, int, int]:
        """Return layers, heads and the width of a head of the decoder."""
        return config.num_decoder_layers, config.num_heads, config.d_kv

    @property
    def decoder_start_token_id(self) -> int | None:
        """The config's, or where it names none the padding, which T5 was trained with (the paper's appendix)."""
        start = super().decoder_start_token_id
        return self.config.pad_token_id if start is None else start

    @property
    def longest_input(self) -> int | None:
        """None: distances have no end."""
        return None


class FlaxT5Model(FlaxT5PreTrainedModel):
    """Encoder and decoder: hidden states."""

    module_class = T5Module


class FlaxT5EncoderModel(FlaxT5PreTrainedModel):
    """The encoder: hidden states."""

    module_class = T5EncoderModule
    ignored_keys = (r"^decoder[./]", r"^lm_head[./]")

    @classmethod
    def rows(cls, module) -> list[Row]:
        """Rows of all parameters of `module`."""
        return t5_rows(module.config, ("encoder",))

    def dummy_inputs(self, input_shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """Return inputs of `input_shape`."""
        return {"input_ids": jnp.ones(input_shape, jnp.int32)}

    def __call__(self, input_ids, attention_mask=None, **options):  # type: ignore[override]
        """Return the states `[batch, length, embed]`; inputs as those of `encode`."""
        return self.encode(input_ids, attention_mask, **options)


class FlaxT5ForConditionalGeneration(FlaxT5PreTrainedModel):
    """A text from a text: logits of the next token."""

    module_class = T5ForConditionalGenerationModule

    @classmethod
    def rows(cls, module) -> list[Row]:
        """Rows of the base model, and of a head that is not tied."""
        config = module.config
        rows = t5_rows(config)
        if not config.tie_word_embeddings:
            std = config.initializer_factor
            rows += linear("lm_head", "lm_head", ("embed", "vocab"), bias=False, required=False, std=std)
        return rows

    @classmethod
    def ties(cls, config) -> tuple[Tie, ...]:
        """The head repeats the word embeddings."""
        return (Tie("lm_head.weight", "shared.weight"),)


class FlaxMT5Model(FlaxT5Model):
    """Encoder and decoder of mT5: hidden states."""

    config_class: ClassVar[Any] = MT5Config


class FlaxMT5EncoderModel(FlaxT5EncoderModel):
    """The encoder of mT5: hidden states."""

    config_class: ClassVar[Any] = MT5Config


class FlaxMT5ForConditionalGeneration(FlaxT5ForConditionalGeneration):
    """A text from a text, in many languages: logits of the next token."""

    config_class: ClassVar[Any] = MT5Config
