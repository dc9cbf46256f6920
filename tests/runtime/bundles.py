"""A small bundle, of add_row_sum on one rank."""

from __future__ import annotations

from pathlib import Path

from etc_dist.codegen import generate
from etc_dist.runtime.build import ARCH, compiler_version, for_bundle
from etc_dist.runtime.bundle import Bundle, write_bundle
from etc_dist.schedule import Plan, schedule_static
from etc_dist.settings import Settings
from etc_dist.verify.proof import proof_record
from examples.add_row_sum import add_row_sum

DIMS = {"rows": 100, "n": 64}


def plan() -> Plan:
    return schedule_static(add_row_sum(1))


def make_bundle(folder: Path, settings: Settings, workers: int = 4) -> Bundle:
    """Write a bundle with one program and one proof."""
    programs = dict([for_bundle(generate(plan()), settings, ARCH)])
    proofs = dict([proof_record(plan(), DIMS, workers, settings)])
    parameters = {"layers": 2, "factors": (1, 2)}
    bundle = Bundle(
        folder, ARCH, compiler_version(), workers, parameters, programs, proofs
    )
    write_bundle(bundle)
    return bundle
