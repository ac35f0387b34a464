"""What families of images share: the check of pixels and sizes, the public call."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from distaff.core.errors import ConfigError, DataError
from distaff.models._family import default_flag
from distaff.pretrained import FlaxPreTrainedModel


def pair_of(size: int | Iterable[int]) -> tuple[int, int]:
    """Return (height, width) of what a config says: one number for both, or the two."""
    if isinstance(size, Iterable):
        height, width = size
        return int(height), int(width)
    return int(size), int(size)


def check_positive(**fields: Any) -> None:
    """Raise `ConfigError` for sizes that are not whole numbers from 1 on; a field is a number or several."""
    for name, value in fields.items():
        each = value if isinstance(value, Iterable) else (value,)
        if not all(isinstance(one, int) and one > 0 for one in each):
            raise ConfigError(f"{name}={value!r} cannot be: sizes are whole numbers from 1 on.")


def check_pixels(pixel_values: jax.Array, channels: int) -> None:
    """Raise `DataError` unless `pixel_values` is floating and surely `[batch, channels, height, width]`."""
    shape = list(pixel_values.shape)
    if len(shape) != 4:
        raise DataError(
            f"pixel_values is {shape} and must be [batch, channels, height, width]: add the axes, as in image[None]."
        )
    if not jnp.issubdtype(pixel_values.dtype, jnp.floating):
        raise DataError(
            f"pixel_values are {pixel_values.dtype} and must be floating numbers: pass the image processor's output."
        )
    if shape[1] != channels:
        remedy = "does the image processor belong to this model?"
        if shape[3] == channels:
            remedy = "it seems to have them last; use pixel_values.transpose(0, 3, 1, 2)."
        raise DataError(f"pixel_values is {shape} and must have {channels} channels, at axis 1: {remedy}")
    if shape[3] == channels:
        raise DataError(
            f"pixel_values is {shape}, and its {channels} channels may stand at axis 1 or 3: resize or pad the images "
            f"to a width other than {channels}."
        )
    if 0 in shape[2:]:
        raise DataError(f"pixel_values is {shape}, images without a pixel: there is nothing to compute.")


class FlaxVisionModel(FlaxPreTrainedModel):
    """A model whose input is pixels `[batch, channels, height, width]`, as image processors return them."""

    main_input_name = "pixel_values"

    def dummy_inputs(self, input_shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """Return an image of the config's size: parameters do not depend on another."""
        size = pair_of(getattr(self.config, "image_size", 32))
        return {"pixel_values": jnp.ones((1, self.config.num_channels, *size), jnp.float32)}

    def answer(
        self, inputs: dict[str, Any], *, states: dict[str, bool | None], return_dict: bool | None, **call: Any
    ) -> Any:
        """Run the module; `states` are the outputs to ask for or not, None for what the config says."""
        asked: dict[str, Any] = {
            name: default_flag(value, getattr(self.config, name)) for name, value in states.items()
        }
        outputs = self.run(inputs, **call, **asked)
        if default_flag(return_dict, self.config.return_dict):
            return outputs
        # With new statistics beside them where the module returned some.
        return (outputs[0].to_tuple(), outputs[1]) if isinstance(outputs, tuple) else outputs.to_tuple()
