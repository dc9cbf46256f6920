"""Whole models as one program.

config.py    sizes and variants, from the config.json of a model
decoder.py   the graph of a decoder's step
"""
