"""The time from weights in memory to a model's first token, with a bundle.

launch/mpirun -n 1 benchmarks/first_token.py --models qwen3-8b

The bundle is built before, by another process, as
`.venv/bin/etc-dist build MODEL --bundle` does.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.decode_step import MODELS, PAGE_SIZE, SMALL_MODELS
from benchmarks.device import Device, Gpu
from benchmarks.harness import begin, provenance, report, shapes_parser
from benchmarks.workload import DTYPE, SMALL
from etc_dist.models import Model
from etc_dist.models.bundle import WORKERS, build_bundle
from etc_dist.models.setup import ModelSetup
from etc_dist.models.weights import weight_shapes
from etc_dist.runtime.build import ARCH
from etc_dist.runtime.bundle import Bundle, read_bundle

BATCH, POSITIONS, TOKENS = 8, 512, 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
PROTOCOL = (
    "weights on the GPU, then models.Model(bundle=) and generate(max_new_tokens=1), "
    f"a prompt of {len(PROMPT)} tokens; once"
)


def setup_of(name: str) -> ModelSetup:
    config = {**MODELS, **SMALL_MODELS}[name]
    return ModelSetup(config, BATCH, POSITIONS, PAGE_SIZE)


def generated(
    device: Device, name: str, weights: Any, bundle: Bundle | None
) -> tuple[list[int], float, dict[str, Any]]:
    """The first id, then several, the seconds until the first, and where it ran."""
    setup, started = setup_of(name), time.perf_counter()
    with Model(
        *(setup.config, weights),
        batch=BATCH,
        positions=POSITIONS,
        page_size=PAGE_SIZE,
        bundle=bundle,
        world=device.world,
    ) as model:
        (first,) = model.generate([PROMPT], max_new_tokens=1)
        seconds = time.perf_counter() - started
        (ids,) = model.generate([PROMPT], max_new_tokens=TOKENS)
        where = provenance(model.program)
    return first + ids, seconds, where


def benchmark(
    device: Device, name: str, folder: Path
) -> tuple[dict[str, Any], list[str]]:
    """A record's fields, and failed checks: the ids are those without a bundle."""
    config = setup_of(name).config
    weights = {
        n: device.random(shape, DTYPE, f"{name} {n}", shape[-1] ** -0.5)
        for n, shape in weight_shapes(config).items()
    }
    device.synchronize()
    with_bundle, seconds, where = generated(device, name, weights, read_bundle(folder))
    without, _, _ = generated(device, name, weights, None)
    wrong = [] if with_bundle == without else ["a bundle gives other ids"]
    values: dict[str, Any] = {"model": name, "batch": BATCH, "positions": POSITIONS}
    if isinstance(device, Gpu):
        values |= {**where, "first_token_s": round(seconds, 3)}
    return values, wrong


def main() -> int:
    parser = shapes_parser(
        "Time a model's first token.", "first_token", {**MODELS, **SMALL_MODELS}
    )
    parser.add_argument("--build", type=Path, help="only build the bundle, here")
    options = parser.parse_args()
    if options.build is not None:
        (name,) = options.models
        print(build_bundle(setup_of(name), options.build, WORKERS, ARCH))
        return 0
    device, failed = begin(options.cpu), False
    shared: dict[str, Any] = {"op": "first_token", "protocol": PROTOCOL}
    names = [SMALL]
    if isinstance(device, Gpu):
        shared |= device.machine()
        names = ["qwen3-8b"]
    for name in options.models or names:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "bundle"
            build = [sys.executable, __file__, "--models", name, "--build", str(folder)]
            subprocess.run(build, check=True)
            values, wrong = benchmark(device, name, folder)
        failed |= not report(device, options.record, shared, values, wrong)
    device.world.close()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
