"""A stack of equal layers: a Python loop, or one scanned layer with stacked parameters."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from distaff.core.errors import UsageError
from distaff.core.mesh import constrain
from distaff.core.tree import STACKED
from distaff.nn.cache import LayerCache
from distaff.nn.dropout import KEPT
from distaff.nn.layer import LayerInputs, LayerOutputs, LayerOwn

# What `gradient_checkpointing` may be, and what of a layer is then kept for the backward pass besides its input. The
# products with weights are those of matrices without batch axes, and convolutions.
POLICIES: dict[str, Any] = {
    "none": None,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        lambda primitive, *_, **__: primitive is lax.conv_general_dilated_p,
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
}
# What a scan keeps of a layer for the backward pass with "none". It stacks all that it keeps, so each number is written
# and read once more than in a loop, where XLA keeps few results of element-wise operations by itself: keeping them all
# made a step of 6 layers, 256 wide, 13 % slower in processor time, and 1.3 times as large (benchmarks/depth.py).
SCANNED = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.save_only_these_names(KEPT)
)


def remat_policy(remat: bool | str) -> str:
    """Return a key of `POLICIES` for what `gradient_checkpointing` is: one itself, or a boolean, where True is all."""
    name = ("full" if remat else "none") if isinstance(remat, bool) else remat
    if name not in POLICIES:
        raise UsageError(f"gradient_checkpointing is {remat!r}: choose one of {', '.join(POLICIES)}.")
    return name


def checkpointed(module: Any, remat: bool | str, **options: Any) -> Any:
    """Return the class `module` so that its backward pass computes again what the policy `remat` does not keep."""
    name = remat_policy(remat)
    return module if name == "none" else nn.remat(module, policy=POLICIES[name], **options)


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

    `remat` says what is computed again in the backward pass, see `checkpointed`. With `scan`, the layer is traced and
    compiled once, and its parameters have a leading layer axis under the name "stacked". `layerdrop` is the probability
    with which a layer is left out while training (Fan et al. 2020). Layers attend as `attn_implementation` says, but
    where attention weights are asked for, the one way that has them, "eager".
    """

    layer_class: type[nn.Module]
    layer_fields: Mapping[str, Any]
    num_layers: int
    remat: bool | str = False
    scan: bool = False
    layerdrop: float = 0.0
    attn_implementation: str = "auto"

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
        way = "eager" if output_attentions else self.attn_implementation
        fields = (self.layer_class, {**self.layer_fields, "attn_implementation": way}, self.layerdrop, collect)
        run = self._scanned if self.scan else self._looped
        hidden = constrain(hidden, "batch", None, None)
        last, collected = run(hidden, shared, caches, deterministic, fields)
        states = tuple(state for state, _ in collected)
        outputs = [rest for _, rest in collected]
        return StackOutputs(
            last,
            (*states, last) if output_hidden_states else None,
            tuple(rest.weights for rest in outputs) if output_attentions else None,
            _given(rest.source_weights for rest in outputs),
            _given(rest.cache for rest in outputs),
        )

    def _looped(self, hidden, shared, caches, deterministic, fields):
        body = checkpointed(_Body, self.remat, static_argnums=(4,))
        collected = []
        for index in range(self.num_layers):
            own = LayerOwn(index, caches[index] if caches else None)
            hidden, rest = body(*fields, name=str(index))(hidden, shared, own, deterministic)
            collected.append(rest)
        return hidden, collected

    def _scanned(self, hidden, shared, caches, deterministic, fields):
        policy = SCANNED if remat_policy(self.remat) == "none" else POLICIES[remat_policy(self.remat)]
        # prevent_cse is needed only outside loops, where XLA could undo the recomputation.
        body = nn.remat(_Body, static_argnums=(4,), prevent_cse=False, policy=policy)
        scanned = nn.scan(
            body,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(nn.broadcast, 0, nn.broadcast),
            length=self.num_layers,
        )
        layers = scanned(*fields, name=STACKED)
        stacked = jax.tree.map(lambda *each: jnp.stack(each), *caches) if caches else None
        hidden, collected = layers(hidden, shared, LayerOwn(jnp.arange(self.num_layers), stacked), deterministic)
        return hidden, [_entry(collected, index) for index in range(self.num_layers)]


def _entry(stacked: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], stacked)


def _given(each) -> tuple[Any, ...] | None:
    found = tuple(each)
    return None if any(one is None for one in found) else found
