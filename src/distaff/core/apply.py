"""The application of a Linen module, jitted."""

import inspect

import jax
from flax import linen as nn


def jitted_apply(module: nn.Module, statistics: str | None = None):
    """Return the module's application, jitted. It holds the module alone: a model that is dropped is freed at once.

    With `statistics`, the name of a collection, it takes all collections for the parameters, and with `train` returns
    `(outputs, {statistics: what they are now})`.
    """
    parameters = inspect.signature(type(module).__call__).parameters
    # A head passes what it does not name on to its base.
    takes_deterministic = "deterministic" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )

    def apply(params, arrays, dropout_rng, *, train, options):
        settings = {**dict(options), **({"deterministic": not train} if takes_deterministic else {})}
        rngs = None if dropout_rng is None else {"dropout": dropout_rng}
        if statistics is None:
            return module.apply({"params": params}, **arrays, **settings, rngs=rngs)
        return module.apply(params, **arrays, **settings, rngs=rngs, mutable=[statistics] if train else False)

    return jax.jit(apply, static_argnames=("train", "options"))
