"""Code generation: a plan becomes CUDA source and the layout of its arguments."""

from etc_dist.codegen.cuda import Source, generate
from etc_dist.codegen.layout import Arguments

__all__ = ["Arguments", "Source", "generate"]
