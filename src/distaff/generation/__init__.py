"""Continuing token ids with a model: options, processors of scores, greedy search, sampling, beam search."""
