"""Checkpoints of Hugging Face's transformers: written as folders that load by themselves, and read where they fit."""
