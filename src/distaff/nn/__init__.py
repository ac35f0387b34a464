"""Shared Linen layers: plain arguments, never a Hugging Face config and never a model type."""
