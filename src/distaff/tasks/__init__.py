"""One file a recipe, read top to bottom: flags, data, loss, wiring. `_flags` and `_recipe` hold what all share."""
