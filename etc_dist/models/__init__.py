"""Whole models as one program.

loading.py      load: a model from a folder or a file
model.py        Model: weights, cache and program; generate, step
batch.py        requests that are decoded together
ids.py          token ids of callers
tokenizer.py    texts and conversations as token ids, and texts of ids
chat_template.py     conversations as text
tokenizer_config.py  what the JSON files of a tokenizer declare
tokenizer_files.py   the tokenizer in a folder
tokenizer_gguf.py    the tokenizer in a GGUF file
chat.py         the command `etc-dist generate`
blas.py         the threads of NumPy, for commands on the CPU backend
config.py       sizes and variants, from the config.json of a model
family.py       what describes a family of models
families.py     the families of models: defaults of fields, and how layers differ
mixture_families.py  those with a mixture of experts
mixture_fields.py    that mixture, from config.json
fields.py       the fields of that file, and what each does here
windows.py      the positions that layers attend to, from the same file
rope.py         the rotary embedding, from the same file
heads.py        the order of the elements of heads
weights.py      the weights of its safetensors files
held_weights.py      the memory that they are read into
safetensors_file.py  the tensors of one of them
quantized.py    which quantized weights they may have, and how these are read
float8.py       weights in float8, and widening them; mxfp4.py: those in MXFP4
weight_files.py the files that are the model's
weight_places.py     the names of its tensors, and where each belongs
part.py         the part of a model that a rank holds
gguf_file.py    configuration and weights of a GGUF file
gguf_keys.py    the keys of its metadata, and what each does here
gguf_mixtures.py     those of mixtures, and the names of their tensors
gguf_reader.py  its metadata and tensors, with all sizes checked
gguf_split.py   the parts of a model in several files
pages.py        the pages of the cache
drafts.py       tokens that may follow a text
prefixes.py     pages that requests with equal beginnings share
written.py      the positions of the cache that steps wrote
rows.py         the numbers of a step
row_numbers.py  the integers of its rows, from lists or arrays
mirror.py       arrays that the host and the backend exchange
step_policy.py  tiles and shares of a step
setup.py        what the program of a model depends on
model_bundle.py the program and its proofs, for other processes
finite.py       the error for logits that are not finite
decoder.py      the graph of a decoder's step
dense_layers.py its first layers, where those alone have no experts
decoder_norms.py     its norms
decoder_ranks.py     its transfers between ranks
decoder_attention.py its attention
sizes.py        the sizes that its program is compiled for
experts.py      the mixture of experts in it
sampling.py     how a token is chosen
library.py      the programs of the library, for building ahead of time
extras.py       packages that only models need"""

from etc_dist.models.batch import Batch as Batch
from etc_dist.models.batch import Request as Request
from etc_dist.models.config import ModelConfig as ModelConfig
from etc_dist.models.config import read_config as read_config
from etc_dist.models.extras import packaged_model as packaged_model
from etc_dist.models.loading import load as load
from etc_dist.models.model import Model as Model
from etc_dist.models.pages import PageTable as PageTable
from etc_dist.models.sampling import Sampling as Sampling
from etc_dist.models.tokenizer import TextStream as TextStream
from etc_dist.models.tokenizer_files import load_tokenizer as load_tokenizer
from etc_dist.models.weights import weight_shapes as weight_shapes

__all__ = [
    "Batch",
    "Model",
    "ModelConfig",
    "PageTable",
    "Request",
    "Sampling",
    "TextStream",
    "load",
    "load_tokenizer",
    "packaged_model",
    "read_config",
    "weight_shapes",
]
