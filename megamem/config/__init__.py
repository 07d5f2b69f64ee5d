"""Configuration of a model: its backbone, what every memory has, rules by width, and what is part of a checkpoint's identity."""
