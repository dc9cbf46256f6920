"""The setup of a model: what its program, its arrays and its proofs depend on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

from etc_dist.compiler import check_options
from etc_dist.errors import ArgumentError, expect_choice, expect_range
from etc_dist.functions.append_kv import PAGE_SIZES
from etc_dist.ir import GraphFunction
from etc_dist.ir.function import MAX_INT
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models.config import ModelConfig
from etc_dist.models.decoder import decoder_for
from etc_dist.models.drafts import MOST_DRAFTS
from etc_dist.models.ids import plain
from etc_dist.models.part import Part, check_ranks
from etc_dist.models.rows import MOST_STOPS
from etc_dist.models.step_policy import (
    MOST_OUTPUTS,
    MOST_REQUESTS,
    MOST_STEPS,
    ROWS,
    StepPolicy,
    most_steps,
    step_counts,
)
from etc_dist.models.weights import weight_shapes
from etc_dist.ops.deterministic import BATCH, check_deterministic
from etc_dist.ops.tuning import Tuning, default_tuning, parse
from etc_dist.runtime.array_checks import bind_dims
from etc_dist.runtime.arrays import Array
from etc_dist.runtime.bundle import Bundle

DEFAULT_POSITIONS = 2048
MOST_GPU_BYTES = 144 << 30
"""No GPU that runs the programs has more memory."""
EXPERTS = "tensor", "parallel"
UNUSED_FIELDS = (
    *("positions", "head", "rope", "rope_base", "is_tied", "stop_tokens"),
    *("windows", "local_rope", "unrotated"),
)
"""Of ModelConfig: neither the program nor its proofs depend on them."""


def part_of(rank: int, ranks: int, experts: str) -> Part:
    """The part of a rank. experts: as for `load`."""
    return Part(rank, ranks, experts == "parallel")


@dataclass(frozen=True)
class ModelSetup:
    """The options of a model, and what follows from them. config: of the whole model.
    ranks: of the world. tuning: that of the step policy. Others: as for `load`."""

    config: ModelConfig
    batch: int = 8
    positions: int | None = None
    page_size: int = 64
    dtype: str = "bfloat16"
    schedule: str = "static"
    steps_per_launch: int = 1
    pages: int | None = None
    deterministic: str = "run"
    speculate: int = 0
    experts: str = "tensor"
    most_rows: int = ROWS[-1]
    ranks: int = 1
    tuning: Tuning = field(default_factory=default_tuning)

    def __post_init__(self) -> None:
        names = "batch", "positions", "page_size", "steps_per_launch", "pages"
        for name in (*names, "speculate", "most_rows"):
            # NOTE: a product of NumPy's integers of 8 bits has 8 bits.
            object.__setattr__(self, name, plain(getattr(self, name)))

    def check(self) -> None:
        """Raise TypeError or ArgumentError for options that no model has."""
        expect_choice(self.experts, EXPERTS, "experts")
        if self.part.has_experts and self.config.mixture is None:
            raise ArgumentError(
                "the model has no experts that ranks could have",
                where='experts="parallel" of the model',
                wanted="a mixture of experts",
                got=self.config.architecture,
                fix="omit experts",
            )
        check_ranks(self.config, self.ranks, self.part.has_experts)
        expect_range(self.batch, 1, MOST_REQUESTS, "batch")
        expect_range(self.most_rows, self.batch, ROWS[-1], "most_rows")
        expect_range(self.most_positions, 2, self.config.positions, "positions")
        expect_range(self.steps_per_launch, 1, MOST_STEPS, "steps_per_launch")
        most = MOST_DRAFTS if self.steps_per_launch == 1 else 0
        expect_range(self.speculate, 0, most, "speculate")
        check_options(self.schedule, None, "a model")
        check_deterministic(self.deterministic)
        expect_choice(self.page_size, PAGE_SIZES, "page_size")
        expect_range(self.all_pages, self.most_pages, MAX_INT, "pages")
        self.check_memory(MOST_GPU_BYTES)

    def check_memory(self, available: int) -> None:
        """ArgumentError if a rank's cache does not fit in `available` bytes."""
        num_bytes = prod(self.cache_shape) * numpy_dtype(self.dtype).itemsize
        if num_bytes > available:
            raise ArgumentError(
                "the cache of the model does not fit in the memory",
                where="batch=, positions= and pages= of the model",
                wanted=f"at most {available} bytes on a rank",
                got=f"{self.all_pages} pages of {num_bytes // self.all_pages} bytes",
                fix="choose fewer of them, or split the model over more ranks",
            )

    @property
    def most_positions(self) -> int:
        """Of a request."""
        if self.positions is not None:
            return self.positions
        return min(self.config.positions, DEFAULT_POSITIONS)

    @property
    def most_pages(self) -> int:
        """Of a request."""
        return -(-self.most_positions // self.page_size)

    @property
    def all_pages(self) -> int:
        """Of the cache."""
        return self.batch * self.most_pages if self.pages is None else self.pages

    @property
    def used_rows(self) -> int:
        """The most rows of a step: each has a position of its own."""
        most = MOST_OUTPUTS if self.deterministic == BATCH else self.most_rows
        return min(most, self.most_rows, self.batch * self.most_positions)

    @property
    def part(self) -> Part:
        """That of the first rank."""
        return part_of(0, self.ranks, self.experts)

    @property
    def own(self) -> ModelConfig:
        """The sizes of a rank's part."""
        return self.part.config(self.config)

    @property
    def cache_shape(self) -> tuple[int, ...]:
        """The shape of the cache of a rank."""
        pages = self.config.layers, self.all_pages, 2, self.own.kv_heads
        return (*pages, self.page_size, self.config.head_dim)

    def show(self) -> str:
        """The model and its options, which all ranks have in common."""
        options = asdict(self)
        del options["tuning"]  # that of the world
        fields = {**options.pop("config"), **options}
        return (
            f"Model({', '.join(f'{name}={value}' for name, value in fields.items())})"
        )

    def graph(self) -> GraphFunction:
        """The graph of the steps."""
        sizes = self.own.sizes(self.page_size, self.dtype)
        return decoder_for(self.schedule, self.ranks, sizes)

    def of_bundle(self, bundle: Bundle) -> ModelSetup:
        """With the bundle's tuning: its proofs are for these tiles."""
        document = bundle.parameters.get("tuning")
        if document is None:
            return self
        origin = f"of bundle {bundle.folder}"
        return replace(self, tuning=parse(document, origin, origin))

    def policy(self, workers: int | None) -> StepPolicy:
        """The policy of a rank's steps. workers: SMs of the GPU; None: on the CPU."""
        return StepPolicy(
            self.own,
            workers,
            in_order=self.deterministic == BATCH,
            tuning=self.tuning,
            ranks=self.ranks,
        )

    def parameters(self) -> dict[str, Any]:
        """By name, for the manifest of a bundle."""
        fields = asdict(self)
        config = fields.pop("config")
        del fields["speculate"]  # the program and its proofs do not depend on it
        for name in UNUSED_FIELDS:
            del config[name]
        fields |= {"positions": self.most_positions, "pages": self.all_pages}
        fields["tuning"] = self.tuning.document()
        return {**config, **fields}

    def dims(self, graph: GraphFunction, workers: int) -> Iterator[dict[str, int]]:
        """The dims of all steps, on GPUs with `workers` SMs."""
        shapes = {
            **weight_shapes(self.config, self.part),
            "embedding": (self.config.vocabulary, self.own.hidden),
            "w_head": (self.own.vocabulary, self.own.hidden),
            **self.config.table_shapes(self.most_positions),
            "table": (self.batch, self.most_pages),
            "cache": self.cache_shape,
        }
        arrays = {n: Array(0, s, "", "", "C", None, n) for n, s in shapes.items()}
        policy = self.policy(workers)
        for step_dims in policy.every(self.most_positions, self.used_rows):
            most = most_steps(step_dims["rows"], self.steps_per_launch)
            has_blocks = step_dims.get("most_blocks", 0) > 0
            counts = [1] if has_blocks else step_counts(most)
            for num_steps, has_samples in product(counts, range(2)):
                more = {"steps": num_steps, "stops": MOST_STOPS, "samples": has_samples}
                yield bind_dims(graph, arrays, {**step_dims, **more})
