"""Whole models as one program.

decoder.py   the graph of a decoder's step
"""
