"""Where a model's parameters lie on a mesh, from the logical axes of their rows."""

import abc
import contextlib
import math
from collections.abc import Iterator
from typing import Any

from flax.errors import ScopeParamShapeError
from jax.sharding import Mesh, NamedSharding

from distaff.core.errors import UsageError
from distaff.core.mesh import on, param_sharding
from distaff.core.tree import Tree, flatten
from distaff.loading import refuse_misfits
from distaff.weights import Leaf


class Placed(abc.ABC):
    """What `FlaxPreTrainedModel` knows of meshes."""

    config: Any
    mesh: Mesh | None
    params_shape_tree: Tree
    _params: Tree | None

    @property
    @abc.abstractmethod
    def params(self) -> Tree:
        """The parameters."""

    @property
    @abc.abstractmethod
    def _table(self) -> dict[str, Leaf]:
        """The rows of each parameter by '/'-path."""

    def param_shardings(self, mesh: Mesh) -> dict[str, NamedSharding]:
        """Return by '/'-path where each parameter lies on `mesh`, from the logical axes of its row."""
        shapes, units = flatten(self.params_shape_tree), self.indivisible()
        return {
            path: param_sharding(mesh, shapes[path].shape, axes, units) for path, axes in self.logical_axes().items()
        }

    def logical_axes(self) -> dict[str, tuple[str | None, ...]]:
        """Return by '/'-path the logical axes of each parameter."""
        return {path: leaf.axes for path, leaf in self._table.items()}

    def indivisible(self) -> dict[str, int]:
        """Return of how many parts, which no mesh may cut, a logical axis consists: the heads."""
        names = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads")
        heads = [getattr(self.config, name) for name in names if getattr(self.config, name, None)]
        return {"heads": math.gcd(*heads)} if heads else {}

    def filled_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return by '/'-path the shapes of parameters with a vocabulary, without the padding that they may have."""
        shapes, vocab = flatten(self.params_shape_tree), getattr(self.config, "vocab_size", None)
        table = {path: leaf for path, leaf in self._table.items() if "vocab" in leaf.axes}
        return {path: leaf.filled(shapes[path].shape, vocab) for path, leaf in table.items()}

    def hand_over(self) -> Tree:
        """Return the parameters and keep none, for a training that takes them: two copies would need twice the room."""
        params, self._params = self.params, None
        return params

    @contextlib.contextmanager
    def computing(self, params: Tree, *arguments: Tree) -> Iterator[None]:
        """Let the programs of a call know the mesh. Raises `UsageError` for what is of a model on another one."""
        try:
            with on(self.mesh, params, *arguments):
                yield
        except ScopeParamShapeError:
            refuse_misfits(params, self.params_shape_tree, name=type(self).__name__)
            raise
        except ValueError as error:
            if "incompatible devices" not in str(error):
                raise
            where = "on no mesh" if self.mesh is None else f"on {self.mesh.size} devices"
            raise UsageError(
                f"Parameters and inputs lie on different devices, and this {type(self).__name__} {where}: bring them "
                "together with jax.device_put, or load the model with mesh=... where they are."
            ) from error

    def _sharding(self, leaf: Leaf, shape: tuple[int, ...]) -> NamedSharding | None:
        return None if self.mesh is None else param_sharding(self.mesh, shape, leaf.axes, self.indivisible())
