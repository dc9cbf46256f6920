"""The ranks of a group, and what one of them refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeAlias

from torch import distributed as dist
from torch.distributed import ProcessGroup

from etc_dist.torch.ops import refuse, world_of
from etc_dist.world import World, current

Group: TypeAlias = ProcessGroup | str | None


class Ranks(NamedTuple):
    """The ranks of a group: its name, their number, and this one. The name "" is that
    of the current world."""

    name: str
    size: int
    rank: int


def ranks_of(group: Group) -> Ranks:
    """The ranks of a process group or of its name; by default of torch's default group,
    or of the current world where torch.distributed is not initialised."""
    process_group: Any = group
    if group is None and dist.is_initialized():
        process_group = dist.group.WORLD
    elif not group:
        world = current()
        return Ranks("", world.size, world.rank)
    elif isinstance(group, str):
        process_group = dist.distributed_c10d._resolve_process_group(group)
    return Ranks(process_group.group_name, process_group.size(), process_group.rank())


@contextmanager
def refusing(group: Group, name: str) -> Iterator[None]:
    """Raise an error of the block, which checks the arguments of `name`, on all ranks
    of the group: on the others at their next call. Without a world, on this rank."""
    try:
        yield
    except Exception as error:
        world: World | None = None
        with suppress(Exception):
            world = world_of(ranks_of(group).name)
        if world is None:
            raise
        refuse(world, error, name)
