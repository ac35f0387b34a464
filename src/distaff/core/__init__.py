"""What every layer stands on and what knows no model: paths, precision, meshes, errors."""
