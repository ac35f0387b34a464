"""A stack of equal layers: a Python loop, or one scanned layer with stacked parameters."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from distaff.core.mesh import constrain
from distaff.core.tree import STACKED
from distaff.nn.cache import LayerCache
from distaff.nn.layer import LayerInputs, LayerOutputs, LayerOwn


class Collect(NamedTuple):
    """What a stack keeps of every layer beside its cache."""

    hidden_states: bool = False
    attentions: bool = False


class StackOutputs(NamedTuple):
    """`last` `[batch, length, embed]`, and of every layer what was asked for: None, or a tuple.

    `hidden_states` has one entry more than there are layers: the input of the first, and the output of each.
    """

    last: jax.Array
    hidden_states: tuple[jax.Array, ...] | None
    attentions: tuple[jax.Array, ...] | None
    source_attentions: tuple[jax.Array, ...] | None
    caches: tuple[LayerCache, ...] | None


class _Body(nn.Module):
    """A layer, LayerDrop around it, in the form that `nn.scan` wants: (carry, what is collected)."""

    layer_class: type[nn.Module]
    layer_fields: Mapping[str, Any]
    layerdrop: float
    collect: Collect

    def setup(self):
        self.layer = self.layer_class(**self.layer_fields)
        # The parameters stand at "stacked/..." or "0/...", without a level for this wrapper.
        nn.share_scope(self, self.layer)

    def __call__(self, hidden, shared, own, deterministic):
        output, rest = self.layer(hidden, shared, own, deterministic)
        if self.layerdrop and not deterministic:
            # The layer is computed all the same: skipping it would depend on data.
            keep = jax.random.bernoulli(self.make_rng("dropout"), 1.0 - self.layerdrop)
            output = jnp.where(keep, output, hidden)
        if not self.collect.attentions:
            rest = LayerOutputs(cache=rest.cache)
        return output, (hidden if self.collect.hidden_states else None, rest)


class Stack(nn.Module):
    """`num_layers` layers of `layer_class(**layer_fields)`, called as `(hidden, LayerInputs, LayerOwn, deterministic)`.

    With `remat`, a layer's activations are computed again in the backward pass instead of kept. With `scan`, the layer
    is traced and compiled once, and its parameters have a leading layer axis under the name "stacked". `layerdrop` is
    the probability with which a layer is left out while training (Fan et al. 2020).
    """

    layer_class: type[nn.Module]
    layer_fields: Mapping[str, Any]
    num_layers: int
    remat: bool = False
    scan: bool = False
    layerdrop: float = 0.0

    @nn.compact
    def __call__(
        self,
        hidden: jax.Array,
        shared: LayerInputs,
        caches: Sequence[LayerCache] | None = None,
        *,
        deterministic: bool,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> StackOutputs:
        """Run `hidden` `[batch, length, embed]` through all layers; `caches` has one entry a layer."""
        collect = Collect(output_hidden_states, output_attentions)
        run = self._scanned if self.scan else self._looped
        hidden = constrain(hidden, "batch", None, None)
        last, collected = run(hidden, shared, caches, deterministic, collect)
        states = tuple(state for state, _ in collected)
        outputs = [rest for _, rest in collected]
        return StackOutputs(
            last,
            (*states, last) if output_hidden_states else None,
            tuple(rest.weights for rest in outputs) if output_attentions else None,
            _given(rest.source_weights for rest in outputs),
            _given(rest.cache for rest in outputs),
        )

    def _looped(self, hidden, shared, caches, deterministic, collect):
        body = nn.remat(_Body, static_argnums=(4,)) if self.remat else _Body
        fields = (self.layer_class, self.layer_fields, self.layerdrop, collect)
        collected = []
        for index in range(self.num_layers):
            own = LayerOwn(index, caches[index] if caches else None)
            hidden, rest = body(*fields, name=str(index))(hidden, shared, own, deterministic)
            collected.append(rest)
        return hidden, collected

    def _scanned(self, hidden, shared, caches, deterministic, collect):
        # prevent_cse is needed only outside loops, where XLA could undo the recomputation.
        body = nn.remat(_Body, static_argnums=(4,), prevent_cse=False) if self.remat else _Body
        scanned = nn.scan(
            body,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(nn.broadcast, 0, nn.broadcast),
            length=self.num_layers,
        )
        layers = scanned(self.layer_class, self.layer_fields, self.layerdrop, collect, name=STACKED)
        stacked = jax.tree.map(lambda *each: jnp.stack(each), *caches) if caches else None
        hidden, collected = layers(hidden, shared, LayerOwn(jnp.arange(self.num_layers), stacked), deterministic)
        return hidden, [_entry(collected, index) for index in range(self.num_layers)]


def _entry(stacked: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], stacked)


def _given(each) -> tuple[Any, ...] | None:
    found = tuple(each)
    return None if any(one is None for one in found) else found
