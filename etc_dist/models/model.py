"""A model: weights, a paged cache, and one program for all steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Self

import numpy as np

from etc_dist.compiler import compile, world_or_current
from etc_dist.errors import ArgumentError, as_refusal, expect_range, expect_type
from etc_dist.functions.scaled_weights import E4M3
from etc_dist.ir.tensor import numpy_dtype
from etc_dist.models.batch import Batch
from etc_dist.models.config import ModelConfig
from etc_dist.models.experts import DecoderMixture
from etc_dist.models.finite import expect_finite
from etc_dist.models.ids import checked_stop, plain
from etc_dist.models.mirror import HostArray
from etc_dist.models.pages import PageTable
from etc_dist.models.rows import NO_ROW, RowArrays, RowChecks, StepRows
from etc_dist.models.sampling import Sampling, checked_sampling
from etc_dist.models.setup import ModelSetup, part_of
from etc_dist.models.step_policy import MOST_REQUESTS, ROWS, num_outputs, padded
from etc_dist.models.weights import check_weights, tied_head
from etc_dist.ops.tuning import tuning_of
from etc_dist.program import Bound, set_capacity_hint
from etc_dist.runtime.build import ARCH
from etc_dist.runtime.bundle import Bundle
from etc_dist.world import World
from etc_dist.world.agreement import sign

Array = np.ndarray[Any, Any]
MOST_PREPARED = 4096
"""Calls that are remembered by the numbers of rows, which may be any."""


class Model:
    """A decoder; made by `load`.

    One program serves every number of requests and every length. Making a model
    compiles it and allocates the cache. A context manager, which closes the model
    unless an exception leaves the block.

    On several ranks, each holds a part of the heads, the inner width and the logits.
    All calls are collective, with equal arguments, and give equal results.

    batch: the most concurrent requests. positions: the most positions of a request,
    its prompt included. most_rows: the most rows of a step. speculate: the most drafts
    of a request's next tokens in a step. pages: the `PageTable` of the cache."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Any],
        *,
        batch: int = 8,
        positions: int | None = None,
        page_size: int = 64,
        schedule: str = "static",
        steps_per_launch: int = 1,
        pages: int | None = None,
        deterministic: str = "run",
        speculate: int = 0,
        experts: str = "tensor",
        most_rows: int = ROWS[-1],
        bundle: Bundle | None = None,
        are_finite: bool = False,
        world: World | None = None,
    ) -> None:
        """weights: NumPy arrays or arrays on the GPU, all bfloat16 or all float16, but
        for float8 codes (on the GPU their bits as uint8) and their scales, by the names
        and of the shapes of `weight_shapes(config)`; on several ranks those of this
        rank's part. bundle: its program and proofs are used. are_finite: the caller has
        checked that the weights are finite, as `load` does; otherwise this reads them
        all once. Other options and errors: as for `load`."""
        self.config, self.world = config, world_or_current(world)
        self.part = part_of(self.world.rank, self.world.size, experts)
        with self.world.exclusive:
            with self.world.refusing("the arguments of a model"):
                setup = ModelSetup(
                    config,
                    batch,
                    positions,
                    page_size,
                    schedule=schedule,
                    steps_per_launch=steps_per_launch,
                    pages=pages,
                    deterministic=deterministic,
                    speculate=speculate,
                    experts=experts,
                    most_rows=most_rows,
                    ranks=self.world.size,
                )
                setup = self._checked(setup, weights, bundle, are_finite)
            text = setup.show()
            self.world.match_call(sign(text), lambda: text)
            if bundle is None:
                setup = replace(setup, tuning=tuning_of(self.world))
            self.batch, self.positions = setup.batch, setup.most_positions
            self.steps_per_launch = setup.steps_per_launch
            self.speculate, self.most_rows = setup.speculate, setup.used_rows
            self.pages = PageTable(
                setup.batch, setup.most_pages, setup.page_size, setup.all_pages
            )
            self._make_program(setup, bundle)
        self._dtype = setup.dtype
        self.world.agree_done(lambda: self._allocate(weights, setup))
        self._checks = RowChecks(
            config.vocabulary, self.most_rows, self.positions, self.pages
        )
        ids = self.part.ids(config.vocabulary)
        self._num_ids = ids.stop - ids.start
        self._bound: dict[tuple[int, ...], tuple[Bound, Array]] = {}
        """By the numbers of rows and of those with logits, with padding, the bucket of
        lengths, whether there are blocks of rows, the number of steps, and whether any
        row is sampled."""
        self._prepared: dict[tuple[int, ...], tuple[int, Bound, Array]] = {}
        """The same by the numbers of rows without padding."""
        self._last_rows = 0

    def _checked(
        self,
        setup: ModelSetup,
        weights: Mapping[str, Any],
        bundle: Bundle | None,
        are_finite: bool,
    ) -> ModelSetup:
        """`setup` with the dtype of the weights, and with what `bundle` says."""
        setup.check()
        setup.check_memory(self.world.free_bytes())
        dtype = check_weights(weights, self.config, self.part, are_finite)
        setup = replace(setup, dtype=dtype)
        if bundle is not None:
            setup = setup.of_bundle(bundle)
            bundle.expect(ARCH, setup.parameters())
        return setup

    def _make_program(self, setup: ModelSetup, bundle: Bundle | None) -> None:
        """The program of all steps, and the policy that chooses its tiles."""
        self.program = compile(
            setup.graph(), self.world, schedule=setup.schedule, bundle=bundle
        )
        is_on_gpu = self.world.backend == "cuda"
        self._policy = setup.policy(self.program.workers if is_on_gpu else None)
        few, every = (
            self._policy.capacity(most, self.positions, self.steps_per_launch)
            for most in (min(MOST_REQUESTS, self.most_rows), self.most_rows)
        )

        # NOTE: not a method, by which the world would own a model that is dropped.
        def capacity(dims: Mapping[str, int]) -> list[Mapping[str, int]]:
            choices = few if dims["rows"] <= MOST_REQUESTS else every
            return [{**dims, **choice} for choice in choices]

        set_capacity_hint(self.program, capacity)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | None = None,
        stop: Collection[int] | None = None,
        sampling: Sampling | Sequence[Sampling | None] | None = None,
    ) -> list[list[int]]:
        """The ids that follow each prompt, without the stop token that ends them.
        Prompts are lists or arrays of integers, and may have different lengths.

        max_new_tokens: of each text; default: as many as fit `positions`. stop: ids
        that end a text; default: those of the model. sampling: one for all texts, or a
        list; default: the most likely id follows.

        Raises ArgumentError before the first step for an empty prompt, ids outside the
        vocabulary, more prompts than `batch`, texts longer than `positions`, and a
        cache with too few free pages; NotFiniteError for logits as of `step`."""
        prompts = plain(prompts)
        expect_type(prompts, (list, tuple), "prompts")
        # Once, since it may be an iterator.
        ends = stop if stop is None else checked_stop(stop, self.config.vocabulary)
        samplings = checked_sampling(sampling, len(prompts), "model.generate")
        with Batch(self) as batch:
            requests = [
                batch.add(
                    prompt,
                    max_new_tokens=max_new_tokens,
                    stop=ends,
                    sampling=text_sampling,
                )
                for prompt, text_sampling in zip(prompts, samplings, strict=True)
            ]
            while not batch.is_done:
                batch.step()
        return [request.new_tokens for request in requests]

    def stream(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop: Collection[int] | None = None,
        sampling: Sampling | None = None,
    ) -> Iterator[int]:
        """The ids that follow one prompt, as they are computed: up to
        `steps_per_launch` after each launch. Otherwise as `generate`, except that
        errors are raised at the first id. Close the iterator to end a text early."""
        with Batch(self) as batch:
            request = batch.add(
                prompt, max_new_tokens=max_new_tokens, stop=stop, sampling=sampling
            )
            num_yielded = 0
            while not batch.is_done:
                batch.step()
                yield from request.new_tokens[num_yielded:]
                num_yielded = len(request.new_tokens)

    def step(self, ids: Any, requests: Any, positions: Any, table: Any) -> Array:
        """One step. ids, requests, positions [rows]: row r has the token ids[r], at
        positions[r] of requests[r]. Returns the most likely next id of each row, int32
        [rows] on the host.

        A row attends to all positions of its request up to its own: rows of earlier
        steps, or of this one. table [requests, most_pages]: the pages of each request,
        see `PageTable`. All are integers on the host, of 1 to `most_rows` rows, and at
        most 512: `steps` takes more.

        Raises ArgumentError, before anything runs, for numbers out of range, for two
        rows at one place of the cache, for a row that attends to a position that no
        step has written, and for numbers that differ between ranks.
        Raises NotFiniteError, after the step, if a row's logits have a NaN, +inf or no
        finite number."""
        next_ids: Array = self.steps(ids, requests, positions, table, count=1)[0]
        return next_ids

    def steps(
        self,
        ids: Any,
        requests: Any,
        positions: Any,
        table: Any,
        *,
        count: int,
        ends: Any = None,
        stops: Sequence[Collection[int]] | None = None,
        sampling: Sampling | Sequence[Sampling | None] | None = None,
        outputs: int | None = None,
    ) -> Array:
        """`count` steps in one launch, at most `steps_per_launch`. Each step continues
        the rows of the one before: row r with the id that was found, at the next
        position, while that is below ends[r]. A row also ends after one of the up to 8
        ids of stops[r]. ends [rows], default: the last row of each request takes part
        in all steps, other rows in one. Several steps have at most 128 rows. `table`
        has the pages of all these positions. sampling: one for all rows, or a list;
        default: the most likely id. outputs: the first rows, which alone get ids and
        logits, up to 512; default: all, which then are at most as many. Of several
        steps, all do.

        Returns the ids that were found, int32 [count, outputs] on the host; -1 for rows
        that have ended. If logits are not finite, all rows end at their step. Other
        arguments and errors: as for `step`."""
        with self.world.exclusive:
            try:
                num_steps = count
                if type(count) is not int or not 1 <= count <= self.steps_per_launch:
                    num_steps = expect_range(count, 1, self.steps_per_launch, "count")
                rows = self._checks.check(
                    ids,
                    requests,
                    positions,
                    table,
                    steps=num_steps,
                    ends=ends,
                    stops=stops,
                    sampling=None
                    if sampling is None
                    else checked_sampling(sampling, np.size(ids), "model.steps"),
                    outputs=outputs,
                )
            except Exception as error:
                self.world.refuse(as_refusal(error, "the arguments of a step"))
            if self.world.size > 1:
                self.world.match_call(rows.signature(), rows.describe)
            self._last_rows, num_rows = rows.outputs, rows.numbers.shape[1]
            length = self._policy.length(rows.longest)
            has_blocks = self._policy.has_blocks(rows.prompt_rows)
            key = (
                *(num_rows, rows.outputs, length, has_blocks),
                *(num_steps, rows.samples),
            )
            prepared = self._prepared.get(key)
            if prepared is None:
                if len(self._prepared) == MOST_PREPARED:
                    self._prepared.clear()
                prepared = self._prepared[key] = self._prepare(rows, num_steps)
            height, bound, host_ids = prepared
            self._rows.fill(rows, height)
            self.program.launch(bound)
            self.program.await_run()
            found_ids: Array = host_ids.copy()
            expect_finite(rows, found_ids, self._dtype)
            self._checks.add_written(rows, found_ids)
            return found_ids

    @property
    def logits(self) -> Any:
        """The logits of the last step [outputs, vocabulary] in the model's dtype: a
        NumPy or CuPy array that the next step overwrites. On several ranks, a part of
        the vocabulary on each, in rank order; the last one may be smaller. Those of
        rows that had ended before the last step are undefined."""
        return self._logits[: self._last_rows, : self._num_ids]

    def close(self) -> None:
        """Free the program's memory; the arrays are freed with the model."""
        self._bound.clear()
        self._prepared.clear()
        self.program.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()

    def _prepare(self, rows: StepRows, num_steps: int) -> tuple[int, Bound, Array]:
        """The number of rows with padding, the call, and where its ids will be."""
        height = padded(rows.numbers.shape[1])
        num_logits = num_outputs(height, rows.outputs)
        length = self._policy.length(rows.longest)
        has_blocks = self._policy.has_blocks(rows.prompt_rows)
        key = height, num_logits, length, has_blocks, num_steps, rows.samples
        if key not in self._bound:
            dims = self._policy.dims(
                height, rows.longest, num_logits, has_blocks=has_blocks
            )
            dims |= {"steps": num_steps, "samples": int(rows.samples)}
            row_arrays = self._rows.fill(rows, height)
            self._bound[key] = self._bind(row_arrays, height, num_logits, dims)
        bound, host_ids = self._bound[key]
        return height, bound, host_ids[:, : rows.outputs]

    def _bind(
        self,
        row_arrays: Mapping[str, Any],
        height: int,
        num_logits: int,
        dims: Mapping[str, int],
    ) -> tuple[Bound, Array]:
        """A step with `height` rows, and where its ids will be."""
        ids_shape = dims["steps"], num_logits
        next_ids = HostArray(ids_shape, self.world.backend, NO_ROW)
        results = {"logits": self._logits[:num_logits], "next_ids": next_ids.device}
        if self.config.mixture is not None:
            results["experts"] = self._experts(height, self.config.mixture)
        arrays = {**self._arrays, **row_arrays, **results}
        bound, _ = self.program.bind_arrays(arrays, dims, None)
        return bound, next_ids.host

    def _experts(self, rows: int, mixture: DecoderMixture) -> Any:
        """The array of the experts that a step's rows choose."""
        shape = self.config.layers, rows, mixture.router.top_k
        return self._best_ids[: prod(shape)].reshape(shape)

    def _allocate(self, weights: Mapping[str, Any], setup: ModelSetup) -> None:
        """Allocate the arrays of the model, and copy its weights. Local.
        ArgumentError if the memory is exhausted."""
        config, dtype = self.config, setup.dtype
        try:
            self._arrays = self._put_all(weights)
            embedding = self._arrays["embedding"]
            if config.is_tied:
                self._arrays["w_head"] = tied_head(embedding, self.part)
            self._arrays["embedding"] = embedding[: config.vocabulary]
            tables = config.tables(self.positions)
            self._arrays |= {name: self._put(table) for name, table in tables.items()}
            self._arrays["cache"] = self._empty(setup.cache_shape, dtype)
            self._rows = RowArrays(self.pages.table.shape, self.world.backend)
            vocabulary = self.part.config(config).vocabulary
            height = padded(self.most_rows)
            num_logits = num_outputs(height, height)
            self._logits = self._empty((num_logits, vocabulary), dtype)
            if config.mixture is not None:
                most = config.layers * height * config.mixture.router.top_k
                self._best_ids = self._empty((most,), "int32")
        except MemoryError as error:
            raise ArgumentError(
                "the model does not fit in the memory",
                where=f"rank {self.world.rank}, {self.world.device}",
                wanted="memory for the weights, the cache and the logits",
                got=f"{type(error).__name__}: {error}",
                fix="load it with fewer pages=, batch= or positions=, or on more ranks",
            ) from error

    def _put_all(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays in the memory of the backend; the same one only once."""
        if self.config.is_tied:
            arrays = {name: a for name, a in arrays.items() if name != "w_head"}
        put: dict[int, Any] = {}
        for array in arrays.values():
            if id(array) not in put:
                put[id(array)] = self._put(array)
        return {name: put[id(array)] for name, array in arrays.items()}

    def _put(self, array: Any) -> Any:
        if self.world.backend == "cpu":
            return array
        import cupy

        if isinstance(array, np.ndarray) and array.dtype == numpy_dtype(E4M3):
            array = array.view(np.uint8)  # CuPy has no float8
        return cupy.asarray(array)

    def _empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        if self.world.backend == "cpu":
            return np.empty(shape, numpy_dtype(dtype))
        import cupy

        return cupy.empty(shape, numpy_dtype(dtype))
