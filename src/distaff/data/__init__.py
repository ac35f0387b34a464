"""Text to batches: numpy in, numpy out, and no model."""
