"""Layers: whole parts of a model as one program."""
