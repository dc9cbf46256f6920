"""Whole models as one program.

config.py    sizes and variants, from the config.json of a model
weights.py   the weights of its safetensors files
decoder.py   the graph of a decoder's step
"""
