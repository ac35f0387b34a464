"""A stack of equal layers: a Python loop, or one scanned layer with stacked parameters."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn

# The name of the scanned layer, in the place of the numbers "0", "1", ... of a loop.
STACKED = "stacked"


class _ScanBody(nn.Module):
    """A layer in the form that `nn.scan` wants: (carry, what is collected)."""

    layer_class: type[nn.Module]
    layer_fields: Mapping[str, Any]
    collect_hidden: bool
    collect_attentions: bool

    def setup(self):
        self.layer = self.layer_class(**self.layer_fields)
        # The parameters stand at "stacked/...", without a level for this wrapper.
        nn.share_scope(self, self.layer)

    def __call__(self, hidden, bias, deterministic):
        output, weights = self.layer(hidden, bias, deterministic)
        return output, (hidden if self.collect_hidden else None, weights if self.collect_attentions else None)


class Stack(nn.Module):
    """`num_layers` layers of `layer_class(**layer_fields)`, each called as `(hidden, bias, deterministic)`.

    With `remat`, a layer's activations are computed again in the backward pass instead of kept. With `scan`, the layer
    is traced and compiled once, and its parameters have a leading layer axis under the name "stacked".
    """

    layer_class: type[nn.Module]
    layer_fields: Mapping[str, Any]
    num_layers: int
    remat: bool = False
    scan: bool = False

    @nn.compact
    def __call__(
        self,
        hidden: jax.Array,
        bias: jax.Array | None,
        *,
        deterministic: bool,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> tuple[jax.Array, tuple[jax.Array, ...] | None, tuple[jax.Array, ...] | None]:
        """Return the last hidden state, and where asked for all `num_layers + 1` of them and all attention weights."""
        run = self._scanned if self.scan else self._looped
        last, states, weights = run(hidden, bias, deterministic, output_hidden_states, output_attentions)
        return last, (*states, last) if output_hidden_states else None, weights if output_attentions else None

    def _looped(self, hidden, bias, deterministic, collect_hidden, collect_attentions):
        layer_class = nn.remat(self.layer_class, static_argnums=(3,)) if self.remat else self.layer_class
        states: tuple[jax.Array, ...] = ()
        attentions: tuple[jax.Array, ...] = ()
        for index in range(self.num_layers):
            states += (hidden,) if collect_hidden else ()
            hidden, weights = layer_class(**self.layer_fields, name=str(index))(hidden, bias, deterministic)
            attentions += (weights,) if collect_attentions else ()
        return hidden, states, attentions

    def _scanned(self, hidden, bias, deterministic, collect_hidden, collect_attentions):
        # prevent_cse is needed only outside loops, where XLA could undo the recomputation.
        body = nn.remat(_ScanBody, static_argnums=(3,), prevent_cse=False) if self.remat else _ScanBody
        scanned = nn.scan(
            body,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(nn.broadcast, nn.broadcast),
            length=self.num_layers,
        )
        layers = scanned(self.layer_class, self.layer_fields, collect_hidden, collect_attentions, name=STACKED)
        hidden, (states, attentions) = layers(hidden, bias, deterministic)
        return hidden, _unstack(states, self.num_layers), _unstack(attentions, self.num_layers)


def _unstack(stacked: jax.Array | None, count: int) -> tuple[jax.Array, ...]:
    return () if stacked is None else tuple(stacked[index] for index in range(count))
